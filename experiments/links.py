"""Keep the documents' links to code true.

    python -m experiments.links            # put every line number right
    python -m experiments.links --check    # exit code 1 when one is wrong

A line may drift by a screen before it counts as wrong, so that not every edit of the code has to
touch the documents.

A link whose text is code and whose address names a line, as in ``[`admit`](../x.py#L12)``, points
at the definition of that name in that file; `Class.method` works too. Other relative links need
only exist.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

SCREEN_LINES = 30
ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>[^)#:\s]+)(?P<line>#L\d+)?\)")


def definitions(file: Path) -> dict[str, int]:
    """Line of every module-level name of a Python file, and of its classes' members."""
    found: dict[str, int] = {}

    def note(prefix: str, body: list[ast.stmt]) -> None:
        for node in body:
            names: list[str] = []
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            for name in names:
                found.setdefault(prefix + name, node.lineno)
            if isinstance(node, ast.ClassDef):
                note(f"{prefix}{node.name}.", node.body)

    note("", ast.parse(file.read_text(encoding="utf-8")).body)
    return found


def mended(page: Path, drift: int = 0) -> tuple[str, list[str]]:
    """A page's text with every line number right that is off by more than `drift` lines, and what
    no edit can mend."""
    text, wrong = page.read_text(encoding="utf-8"), []

    def mend(link: re.Match[str]) -> str:
        target = page.parent / link["path"]
        if not target.exists():
            wrong.append(f"{page.name}: {link['path']} does not exist")
            return link[0]
        if not link["line"]:
            return link[0]
        name = link["text"].strip("`")
        line = definitions(target).get(name)
        if line is None:
            wrong.append(f"{page.name}: {link['path']} defines no {name}")
            return link[0]
        if abs(line - int(link["line"].removeprefix("#L"))) <= drift:
            return link[0]
        return f"[{link['text']}]({link['path']}#L{line})"

    return _LINK.sub(mend, text), wrong


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    wrong: list[str] = []
    for page in PAGES:
        text, lost = mended(page, SCREEN_LINES if args.check else 0)
        wrong += lost
        if text != page.read_text(encoding="utf-8"):
            if args.check:
                wrong.append(f"{page.name}: lines have moved: python -m experiments.links")
            else:
                page.write_text(text, encoding="utf-8")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
