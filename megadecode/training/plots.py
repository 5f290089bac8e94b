"""Pictures of an evaluation; needs the extra `plots`, without which nothing is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megadecode.training.walk import CHAIN


def draw(tables: list[dict[str, Any]], folder: Path) -> list[Path]:
    """`tau_by_rows.png`, `tau_by_context.png` and `recall.png` in `folder`; the files drawn."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    full = [t for t in tables if t["texts"]]
    drawn = []

    def save(name: str) -> None:
        plt.tight_layout()
        plt.savefig(folder / name, dpi=120)
        plt.close()
        drawn.append(folder / name)

    def trees(tau: dict[str, float]) -> tuple[list[int], list[float]]:
        pairs = [(int(name[2:]), value) for name, value in tau.items() if name != CHAIN]
        return [n for n, _ in pairs], [value for _, value in pairs]

    if not full:
        return drawn
    plt.figure(figsize=(6, 4))
    for t in full:
        if t["context"] is None:
            label = f"{t['domain'] or 'all'}, T = {t['temperature']:g}"
            line = plt.plot(*trees(t["tau"]), marker="o", label=label)[0]
            if CHAIN in t["tau"]:
                plt.axhline(t["tau"][CHAIN], color=line.get_color(), linestyle=":", linewidth=0.8)
    plt.xscale("log", base=2)
    plt.xlabel("verify rows N (dotted: the chain)")
    plt.ylabel("tokens committed per step")
    plt.legend(fontsize=7)
    save("tau_by_rows.png")

    plt.figure(figsize=(6, 4))
    for temperature in sorted({t["temperature"] for t in full}):
        some = [
            t
            for t in full
            if t["domain"] is None and t["context"] and t["temperature"] == temperature
        ]
        for name in some[0]["tau"] if some else {}:
            plt.plot(
                [t["context"] for t in some], [t["tau"][name] for t in some], marker="o",
                linestyle="-" if temperature == 0 else "--", label=f"{name}, T = {temperature:g}",
            )  # fmt: skip
    plt.xscale("log", base=2)
    plt.xlabel("context, tokens")
    plt.ylabel("tokens committed per step")
    plt.legend(fontsize=7)
    save("tau_by_context.png")

    plt.figure(figsize=(6, 4))
    for t in full:
        if t["domain"] is None and t["context"] is None:
            for rank, row in t["recall"].items():
                label = f"among {rank}, T = {t['temperature']:g}"
                plt.plot(range(1, len(row) + 1), row, marker="o", label=label)
    plt.xlabel("drafted position")
    plt.ylabel("true token among the likeliest")
    plt.legend(fontsize=7)
    save("recall.png")
    return drawn
