"""What the experiments' scripts share: their command line, their result file, their plots.

A result file is experiments/results/NAME.json: `about` (the command), `device` (a GPU's name or
`cpu`), where the figures come from (provenance.py), then the experiment's own fields.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.provenance import provenance

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parent / "pictures"
HATCHES = ("", "///", "...", "xx", "--", "\\\\\\", "oo", "++")
LINES = ("-", "--", ":", "-.")
MARKS = ("o", "s", "^", "x", "D", "v")

FLOORS = {"device": 0.075, "host": 0.35}
"""The least relative spread that is stated of a time: by a device's clock, and of a time in which
the host's Python has a part. They are what two full runs on two GPUs differed by (the largest
device figure 7 %; nine of ten host figures 30 %: another job shares the cores); those runs
themselves had stated 3 % and 10 %, see the report."""
SHARE = 0.02
"""The same of a share, absolutely."""
MANY = 20


def figure(
    samples: Sequence[float], kind: str = "device", resolution: float = 0.0
) -> dict[str, Any]:
    """A figure with its stated spread, for the field `figures` (label -> figure) of a result file.

    samples: of a run's rounds, which alternate between what is compared; more than MANY are taken
    as five rounds, medians of consecutive parts. kind: `device`, `host` (a time or a rate) or
    `share`. `value` is the samples' median; `spread`, in the same unit, what another run's median
    may differ by: the range of the rounds, and at least FLOORS or SHARE, and `resolution`, what the
    clock can tell apart.
    """
    value, rounds = statistics.median(samples), list(samples)
    if len(samples) > MANY:
        n = len(samples)
        rounds = [statistics.median(samples[i * n // 5 : (i + 1) * n // 5]) for i in range(5)]
    low, high = min(rounds), max(rounds)
    least = SHARE if kind == "share" else FLOORS[kind] * abs(value)
    spread = max(high - low, least, resolution)
    return {"value": value, "least": low, "most": high, "spread": spread, "kind": kind}


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """The options that all of them have; the first line of the script's docstring on top."""
    made = argparse.ArgumentParser(
        description=(doc or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument(
        "--json",
        type=Path,
        default=RESULTS / f"{name}.json",
        help="where the result goes (of the CPU device NAME_cpu.json)",
    )
    made.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    return made


def default_device() -> str:
    """`cuda` where torch sees a GPU, else `cpu`."""
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def need_gpu(name: str, also: str = "") -> None:
    """Leave with a message for people where there is no GPU. also: what else the script needs."""
    if default_device() == "cpu":
        more = f" It also needs {also}." if also else ""
        raise SystemExit(f"{name} measures an NVIDIA GPU; torch sees none here.{more}")


def of_kernels(doc: str | None, name: str, *more: str) -> argparse.Namespace:
    """The arguments of a script that times kernels out of a folder: folder, result, and lists with
    the names in `more` (empty: all). Leaves where there is no GPU."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("folder", type=Path, help="kernels, built beforehand")
    made.add_argument("result", type=Path, help="the file to write")
    for argument in more:
        made.add_argument(argument, nargs="*", help="which of them; by default all")
    args = made.parse_args()
    need_gpu(name)
    return args


def quiet() -> None:
    """Silence the warnings of libraries that a table should not be cut by."""
    warnings.filterwarnings("ignore", message="To copy construct from a tensor")
    warnings.filterwarnings("ignore", category=FutureWarning)


def other_place(path: Path, device: str) -> Path:
    """Results of the CPU device do not overwrite a GPU's: they have a file of their own, unless
    another one was named."""
    if device == "cpu" and path.parent == RESULTS:
        return path.with_name(f"{path.stem}_cpu.json")
    return path


def save(name: str, path: Path, device: str, fields: dict[str, Any], quick: bool = False) -> None:
    """Write a result file. Its `load` is the machine's, the script's own part included: times of a
    CPU that others used at the same time are worth little."""
    path, origin = other_place(path, device), provenance()
    result = {
        "about": f"python -m experiments.{name}" + (" --quick" if quick else ""),
        "device": origin.get("gpu", "cuda") if device == "cuda" else "cpu",
        **origin,
        "load": round(os.getloadavg()[0], 1),
        **fields,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


def digest(path: Path) -> str:
    """Of a result file: what a picture says it was drawn from."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def picture(title: str, x: str, y: str, size: tuple[float, float] = (6.4, 3.4)) -> Any:
    """(figure, axes) in the one style of all: grey, thin, readable in black and white."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "megadecode", "font.size": 9, "hatch.linewidth": 0.5})
    figure, axes = plt.subplots(figsize=size)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def keep(figure: Any, name: str, source: Path) -> None:
    """Write a picture where the report looks for it, with what it was drawn from."""
    import matplotlib.pyplot as plt

    PICTURES.mkdir(exist_ok=True)
    figure.tight_layout()
    about = f"drawn from {source.name} {digest(source)}"
    figure.savefig(
        PICTURES / f"{name}.svg", bbox_inches="tight",
        metadata={"Date": None, "Description": about},
    )  # fmt: skip
    plt.close(figure)
