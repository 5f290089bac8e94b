"""PTX text as a list of instructions."""

from __future__ import annotations

import re
from typing import NamedTuple

_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_STATEMENT = re.compile(r"(@!?[%\w]+\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"(\$\w+):")
_NAME = re.compile(r"(?<![%\w.$])[a-zA-Z_]\w*")


class Instruction(NamedTuple):
    """`guard` is the predicate's register ("" without one), negated where `unless`."""

    guard: str
    unless: bool
    op: tuple[str, ...]  # the dotted parts of its name
    operands: list[str]

    @property
    def kind(self) -> str:
        return self.op[-1]


def read_kernel(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """(instructions, label -> index) of the one kernel of a PTX module.

    Registers that inline PTX declares in braces of its own get names that no other has, ending in
    their type.
    """
    body = text[text.index("{\n", text.index(".reqntid")) + 1 :]
    body = re.sub(r"//.*", "", body)
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    scopes: list[dict[str, str]] = [{}]
    at = opened = 0
    while True:
        while body[at].isspace():
            at += 1
        if body[at] == "{":
            scopes.append({})
            opened += 1
            at += 1
        elif body[at] == "}":
            scopes.pop()
            at += 1
            if not scopes:
                return found, labels
        elif label := _LABEL.match(body, at):
            labels[label.group(1)] = len(found)
            at = label.end()
        else:
            end = body.index(";", at)
            statement, at = body[at:end].strip(), end + 1
            if not statement.startswith("."):
                found.append(_instruction(statement, scopes))
            elif statement.startswith(".reg") and "%" not in statement:
                kind, names = statement[4:].split(None, 1)
                for name in names.split(","):
                    scopes[-1][name.strip()] = f"{name.strip()}_{opened}_{kind[1:]}"


def _instruction(statement: str, scopes: list[dict[str, str]]) -> Instruction:
    def rename(match: re.Match[str]) -> str:
        name = match.group(0)
        return next((s[name] for s in reversed(scopes) if name in s), name)

    parts = _STATEMENT.match(statement)
    assert parts is not None, statement
    guard, op, rest = parts.groups()
    guard = _NAME.sub(rename, guard.strip()[1:]) if guard else ""
    operands = [part.strip() for part in _OPERANDS.findall(_NAME.sub(rename, rest))]
    return Instruction(guard.lstrip("!"), guard.startswith("!"), tuple(op.split(".")), operands)
