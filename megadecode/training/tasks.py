"""What the target is asked: how user turns open, what is to be done to a given text, made-up texts.

Nothing here is anybody's data: the model itself goes on from a few opening words, and given texts
are its own answers or lines made up from short word lists.
"""

from __future__ import annotations

import numpy as np

OPENINGS: dict[str, tuple[str, ...]] = {
    # The empty opening samples whatever the model takes for a user's turn.
    "chat": (
        *[""] * 12,
        "What is", "Why do", "How does", "Can you explain", "Tell me about", "Write a short story",
        "Write an email to", "I am feeling", "What would happen if", "Compare",
    ),
    "code": (
        "Write a Python function that", "Write a Python program that", "Write a Python class for",
        "Write a JavaScript function that", "Write an SQL query that", "Write a C function that",
        "Write a shell script that", "Write unit tests for", "Write HTML for a page that",
        "Explain what this Python code does:\n", "Fix the bug in this code:\n",
        "In Python, how do I",
    ),
    "list": (
        "List ten", "List the", "Give me a list of", "Name five", "What are some", "Give ten tips",
        "Make a shopping list for", "Write a step-by-step guide to", "What are the advantages of",
        "Outline the steps to", "Make a table of", "Give examples of",
    ),
}  # fmt: skip
"""By domain, how the model is made to begin a user turn; it writes the rest."""

REWRITES = (
    "Rewrite the following text in simpler words.",
    "Rewrite the following text so that it sounds more formal.",
    "Rewrite the following text so that it sounds friendly.",
    "Repeat the following text exactly.",
    "Correct the mistakes in the following text.",
    "Rewrite the following text as a list of bullet points.",
    "Improve the style of the following text.",
    "Shorten the following text.",
    "Summarize the following text.",
    "Summarize the following text in three sentences.",
    "Continue the following text.",
    "What are the main points of the following text?",
)

_THINGS = (
    "lamps",
    "ropes",
    "maps",
    "bricks",
    "candles",
    "shovels",
    "blankets",
    "kettles",
    "chairs",
)
_PLACES = ("the harbour", "Lund", "the north store", "hall B", "Porto", "the school", "Graz")
_PEOPLE = ("Ana", "Tomas", "Mei", "Idris", "Karin", "Pavel", "Noor", "Luis")
_STATES = ("delivered", "returned", "on hold", "in transit", "checked", "damaged")


def made_up_text(rng: np.random.Generator, lines: int) -> str:
    """Lines of one kind about stock, shifts or measurements, with the numbers drawn."""

    def one(words: tuple[str, ...]) -> str:
        return words[rng.integers(len(words))]

    def number(high: int) -> int:
        return int(rng.integers(1, high))

    kind = rng.integers(4)
    made = []
    for _ in range(lines):
        if kind == 0:
            made.append(
                f"Order {number(9999)}: {number(90)} {one(_THINGS)} for {one(_PLACES)}, "
                f"{one(_STATES)} on day {number(30)}."
            )
        elif kind == 1:
            made.append(
                f"{one(_PEOPLE)} worked {number(9)} hours at {one(_PLACES)} and counted "
                f"{number(400)} {one(_THINGS)}."
            )
        elif kind == 2:
            made.append(
                f"{one(_THINGS)},{number(500)},{number(99)}.{number(99):02d},{one(_STATES)}"
            )
        else:
            made.append(
                f"[{number(24):02d}:{number(60):02d}] {one(_PEOPLE).lower()}: {one(_THINGS)} "
                f"{one(_STATES)} (code {number(9999)})"
            )
    return "\n".join(made)


def with_text(rng: np.random.Generator, text: str) -> str:
    """A user turn that gives a text and says what to do with it, before or behind it."""
    task = REWRITES[rng.integers(len(REWRITES))]
    if rng.integers(3):
        return f"{task}\n\n{text}"
    return f"{text}\n\n{task.replace('the following text', 'the text above')}"
