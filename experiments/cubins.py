"""The kernels that the experiments load beside the engine's own:

    python -m experiments.cubins DIR [NAME ...]      builds them anywhere; needs the CuTe DSL

Without names all of them. A script that wants some takes a folder of them (`--cubins`); without one
it builds what is missing here, which takes minutes the first time and nothing later, or says so
where the DSL is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TREES = ("tree-smollm2-135m",)
MOVES = tuple(f"compact-{model}" for model in ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b"))
TIMED = ("timed-smollm2-135m", "timed-llama-3.2-1b")
TRACED = ("pdl-smollm2-135m", "timed-smollm2-135m-phases", "pure-stream")
PDL = ("pdl-smollm2-135m", "pdl-llama-3.2-1b")  # of several files each
ATTENTION = (
    "attention-smollm2-135m", "attention-llama-3.2-1b", "attention-llama-3.1-8b",
    "attention-smollm2-135m-splits4", "attention-smollm2-135m-splits8",
    "attention-smollm2-135m-splits16", "attention-llama-3.2-1b-splits4",
    "attention-llama-3.2-1b-splits8",
)  # fmt: skip
ALL = (*TIMED, *PDL, *TRACED[1:], *TREES, *MOVES, *ATTENTION)
BUILDERS = {
    "timed": "tests.gpu.kernels",
    "tree": "tests.gpu.speculate_kernels",
    "compact": "tests.gpu.speculate_kernels",
    "attention": "tests.gpu.attention_kernels",
    "pure": "experiments.baselines.stream_kernel",
    "pdl": "experiments.baselines.pdl_kernels",
}
ROOT = Path(__file__).parent.parent


def place(home: Path | None = None) -> Path:
    """Where kernels go that no folder was named for."""
    return (home or Path.home()) / ".cache" / "megadecode" / "experiments" / "kernels"


def engine_runs(kernels: str | None) -> bool:
    """Whether an engine has its kernels: from a folder, or built where it starts."""
    found = kernels is not None or importlib.util.find_spec("cutlass") is not None
    if not found:
        print("the megakernel is left out: no --kernels, and no CuTe DSL to build them with")
    return found


def build(folder: Path, names: Sequence[str]) -> None:
    """Build into a folder; what was built from the same sources comes from the cache beside it."""
    for builder in dict.fromkeys(BUILDERS.values()):
        some = [n for n in names if BUILDERS[n.split("-")[0]] == builder]
        if some:
            some = [n.removeprefix("pdl-") for n in some]
            subprocess.run([sys.executable, "-m", builder, folder, *some], check=True, cwd=ROOT)


def find(folder: Path | None, *names: str) -> Path | None:
    """A folder that holds the named kernels: the given one, or one that they are built into here.
    None where there is no DSL to build them with. SystemExit if the given folder lacks one."""
    if folder is not None:
        lacking = [n for n in names if not list(folder.glob(f"{n}*.cubin"))]
        if lacking:
            raise SystemExit(f"{folder} has no {', '.join(lacking)}: python -m experiments.cubins")
        return folder
    if importlib.util.find_spec("cutlass") is None:
        print("kernels are left out: the CuTe DSL, which builds them, is not installed (--cubins)")
        return None
    build(place(), names)
    return place()


def main() -> None:
    """Command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("folder", type=Path)
    made.add_argument("names", nargs="*", help=f"of {', '.join(ALL)}; without, all")
    args = made.parse_args()
    if unknown := [name for name in args.names if name.split("-")[0] not in BUILDERS]:
        made.error(f"no such kernel: {', '.join(unknown)}")
    build(args.folder.resolve(), args.names or ALL)


if __name__ == "__main__":
    main()
