"""The card of a trained drafter: what it is, what it was made from, what it is worth. Generated."""

from __future__ import annotations

from typing import Any


def tau_table(tables: list[dict[str, Any]], *, by: str = "all") -> list[str]:
    """Markdown lines of tau by policy, from `evaluate`'s tables.

    by: `all`, every table; `margins`, only those over all domains or all contexts.
    """
    shown = [
        t
        for t in tables
        if t["texts"] and (by == "all" or t["domain"] is None or t["context"] is None)
    ]
    if not shown:
        return []
    names = list(shown[0]["tau"])
    lines = [
        f"| domain | context | T | texts | {' | '.join(names)} |",
        "|---|---|---|---|" + "---|" * len(names),
    ]
    for t in shown:
        values = " | ".join(f"{t['tau'][name]:.2f}" for name in names)
        lines.append(
            f"| {t['domain'] or 'all'} | {t['context'] or 'all'} | {t['temperature']:g} | "
            f"{t['texts']} | {values} |"
        )
    return lines


def recall_table(tables: list[dict[str, Any]]) -> list[str]:
    """Markdown lines of recall by drafted position, over all texts of a temperature."""
    shown = [t for t in tables if t["texts"] and t["domain"] is None and t["context"] is None]
    if not shown:
        return []
    drafted = len(next(iter(shown[0]["recall"].values())))
    positions = " | ".join(str(i + 1) for i in range(drafted))
    lines = [f"| T | among the likeliest | {positions} |", "|---|---|" + "---|" * drafted]
    for t in shown:
        for rank, row in t["recall"].items():
            values = " | ".join(f"{value:.2f}" for value in row)
            lines.append(f"| {t['temperature']:g} | {rank} | {values} |")
    return lines


def _values(table: dict[str, Any]) -> list[str]:
    lines = ["| what | value |", "|---|---|"]
    for key, value in table.items():
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        if isinstance(value, dict):
            text = ", ".join(f"{k}: {v}" for k, v in value.items())
        lines.append(f"| {key} | {text} |")
    return lines


def _drafted(run: dict[str, Any]) -> str:
    drafted = run.get("drafted_tokens")
    if not drafted:
        return ""
    return (
        f" It drafts the {drafted['count']} tokens that its target writes most, "
        f"{drafted['share_of_corpus']:.2%} of the training text; the tables below are of the same "
        f"weights without that limit.{_cost(drafted)}"
    )


def _cost(drafted: dict[str, Any]) -> str:
    held_out = drafted.get("held_out")
    if not held_out:
        return ""
    pairs = ", ".join(
        f"{name} {free:.2f} to {held_out['tau_limited'][name]:.2f}"
        for name, free in held_out["tau"].items()
    )
    return f" On {held_out['texts']} greedy held-out texts the limit costs: {pairs}."


def card(run: dict[str, Any]) -> str:
    """Markdown of one training run's record.

    `run` has drafter (its configuration), recipe, corpus, steps, seconds, device, tables (see
    `evaluate.tables`).
    """
    drafter, tables = run["drafter"], run["tables"]
    looping = sum(
        t["looping"]["texts"] for t in tables if t["domain"] is None and t["context"] is None
    )
    parts = [
        f"# {drafter['name']}",
        "",
        f"A DFlash drafter: {drafter['layers']} layers of width {drafter['hidden']}, blocks of "
        f"{drafter['block_size']}, features of the target's layers "
        f"{', '.join(map(str, drafter['taps']))}. It belongs to the target with the fingerprint "
        f"`{drafter['target_fingerprint']}` and is refused by any other. It never changes a text, "
        f"only how fast it comes.{_drafted(run)} Licence: Apache-2.0, as the project's and the "
        "target's.",
        "",
        "## Data",
        "",
        "Every training token was written by the target itself: user turns sampled from the bare "
        "chat prefix, answers to them greedy and sampled, and given texts continued, summarised "
        "and rewritten. No other data was used. Held-out texts share no prompt with training.",
        "",
        *_values(run["corpus"]),
        "",
        "## Recipe",
        "",
        f"{run['steps']} steps in {run['seconds']:.0f} s on one {run['device']}.",
        "",
        *_values(run["recipe"]),
        "",
        "## Tokens committed per verify step, held-out texts",
        "",
        "Along the engine's own walk; N: rows of a tree, its root among them. Texts in which 16 "
        f"tokens occur three times are left out ({looping} of them): loops are easy to draft.",
        "",
        *tau_table(tables),
        "",
        "## Recall by drafted position",
        "",
        *recall_table(tables),
        "",
    ]
    return "\n".join(parts)
