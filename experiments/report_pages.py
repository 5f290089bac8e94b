"""The report's pages: for each experiment what it shows, a table, and where we lose.

A page is a function of a result file's contents to Markdown lines. Figures in the prose are
computed; what is judged is said as it follows from them.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from cute_kernels.gpu.config import SHAPES
from experiments.report_host import host_stall, step_breakdown
from experiments.report_rivals import (
    Result,
    baseline_steps,
    context_sweep,
    dram_trace,
    pdl_steps,
    public_megakernel,
    table,
)
from experiments.report_sections import read, where

SHUFFLED = "ours, pages shuffled"


def tree_build(r: Result) -> list[str]:
    names = list(r["rows"][0]["us"])
    beside = next(row for row in r["rows"] if row["budget"] == r["beside"])
    python, masked = beside["us"]["python heap"], beside["us"]["python heap + mask"]
    ratios = {  # of the same work: no mask
        name: max((row["us"]["python heap"] / row["us"][name], row["budget"])
                  for row in r["rows"] if name in row["us"])
        for name in names if not name.startswith("python")
    }  # fmt: skip
    said = ", ".join(f"{name} {ratio:.1f}x (at B = {b})" for name, (ratio, b) in ratios.items())
    most = max(ratio for ratio, _ in ratios.values())
    slower = [name for name in ratios if beside["us"].get(name, 0) > python]
    shares = [  # of the machine's own steps
        [name, f"{step:.0f}", f"{masked / step:.2%}", f"{least / step:.2%}"]
        for least in [min(us for name, us in beside["us"].items() if "mask" not in name)]
        for name, step in r["step_us"].items()
        if name.startswith("CPU device") == (r["device"] == "cpu")
    ]
    lines = [
        f"One tree of B nodes over {r['depth']} drafted positions, us; all builders make the same "
        f"tree. At best, over the Python heap: {said}. The claim is 474x; the most seen here is "
        f"{most:.0f}x."
        + (
            f" At B = {r['beside']}, where the Python heap takes {python:.1f} us, these are slower "
            f"than it: {', '.join(slower)}."
            if slower
            else ""
        )
        + " The kernel's phase holds up to 127 nodes and needs no copy to the host and back.",
        "",
        *table(
            ["B", *names],
            [[row["budget"], *(f"{row['us'][n]:.1f}" if n in row["us"] else "" for n in names)]
             for row in r["rows"]],
        ),
    ]  # fmt: skip
    if shares:
        lines += [
            "",
            f"What a tree of {r['beside']} nodes takes of a step: a heap in Python with its mask, "
            "and the fastest builder. The difference between the two columns is all that a faster "
            "builder can win.",
            "",
            *table(["step", "us", "Python heap + mask", "fastest"], shares),
        ]
    return lines


def kv_fragmentation(r: Result) -> list[str]:
    names = list(r["cases"][0]["us"])

    def ratios(of: str, over: str) -> list[float]:
        return [c["us"][of] / c["us"][over] for c in r["cases"] if of in c["us"]]

    def worst(of: str, over: str) -> float:
        return max(ratios(of, over))

    def cost(of: str, over: str) -> str:
        found = ratios(of, over)
        return f"{median(found) - 1:+.1%} in the median and {max(found) - 1:+.0%} at most"

    shuffled = cost("pages of 64 shuffled", "pages of 64 in order")
    single = cost("single rows shuffled", "pages of 64 in order")
    paged = worst("pages of 64 in order", "contiguous")
    equal = all(c["outputs_equal"] for c in r["cases"])
    lines = [
        f"One layer's attention of {r['rows']} rows, us. Over pages of 64 that lie in order, the "
        f"same pages shuffled over a pool four times as large cost {shuffled}, single rows all "
        f"over it {single}: that is all a defragmentation could win, and "
        "one copy of the cache, the last column, is what it costs each time. Outputs are the same "
        f"bits: {'yes' if equal else 'NO'}. What this Triton kernel pays for, up to {paged:.1f}x "
        "contiguous keys, is looking a page up for every key, in order or not.",
    ]

    def spread(c: Result) -> float:
        figures = r.get("figures", {})
        both = (f"{c['model']} at {c['context']}, {n}, us" for n in ("contiguous", SHUFFLED))
        return max((figures[label]["spread"] for label in both if label in figures), default=0.0)

    if "ours, pages in order" in names:
        own = cost(SHUFFLED, "ours, pages in order")
        ahead = [
            f"{c['model']} at {c['context']}"
            for c in r["cases"]
            if c["us"]["contiguous"] < c["us"][SHUFFLED] - spread(c)
        ]
        lines[0] += (
            f" Ours copies whole blocks, so that it looks up one page in 64 keys: shuffled {own}."
        )
        if ahead:
            lines[0] += (
                " **Triton over contiguous keys is faster than ours over pages** at "
                + "; ".join(ahead) + " (ours has a hand-off between layers in its figure)."
            )  # fmt: skip
    return [
        *lines,
        "",
        *table(
            ["", *names],
            [
                [f"{c['model']} at {c['context']}", *(f"{c['us'][n]:.1f}" for n in names)]
                for c in r["cases"]
            ],
        ),
    ]


def _with_splits(r: Result, other: Result | None) -> list[Result]:
    """The cases of layers; the rivals' numbers of splits that they lack from another run's file."""
    if other is None:
        return list(r["layer"])
    place = {(c["model"], c["rows"], c["context"]): c["us"] for c in other["layer"]}
    out = []
    for c in r["layer"]:
        more = place.get((c["model"], c["rows"], c["context"]), {})
        us = {n: us for n, us in more.items() if not n.startswith("ours")} | c["us"]
        rivals = [n for n in us if not n.startswith("ours")]
        order = sorted(rivals, key=lambda n: int(n.split()[0]) if n[0].isdigit() else 0)
        own = [n for n in us if n not in rivals]
        out.append(c | {"us": {n: us[n] for n in (*order, *own)}})
    return out


def _verify_layers(layer: list[Result]) -> list[str]:
    """The table of layers, split where cases have other columns, and who is ahead."""
    lines: list[str] = []
    lost = []
    for rows in dict.fromkeys(c["rows"] for c in layer):
        cases = [c for c in layer if c["rows"] == rows]
        names = list(dict.fromkeys(n for c in cases for n in c["us"]))
        lines += [
            "",
            *table(
                [f"N = {rows}", *names],
                [
                    [f"{c['model']} at {c['context']}"]
                    + [f"{c['us'][n]:.1f}" if n in c["us"] else "" for n in names]
                    for c in cases
                ],
            ),
        ]
        for c in cases:
            own = {n: us for n, us in c["us"].items() if n.startswith("ours")}
            other = {n: us for n, us in c["us"].items() if n not in own}
            if own and min(own.values()) > min(other.values()):
                best = min(other, key=lambda n: other[n])
                lost.append(
                    f"{c['model']}, N = {rows} at {c['context']} ({min(own.values()):.1f} against "
                    f"{other[best]:.1f} us, {best})"
                )
    if lost:
        lines += ["", "**The best Triton form beats ours** at " + "; ".join(lost) + "."]
    return lines


def _own_share(r: Result, by: Result) -> str:
    """What of the step of our phases is attention's, by the layers alone."""
    layers = SHAPES[r["model"]].layers
    said = []
    for c in r["layer"]:
        n = str(c["context"])
        own = [us for name, us in c["us"].items() if name.startswith("ours")]
        if c["model"] == r["model"] and c["rows"] == 16 and own and n in by.get("ours", {}):
            won = layers * (c["us"]["64 splits"] - min(own))
            whole = by["64 splits"][n] - by["ours"][n]
            said.append(f"{won:.0f} of {whole:.0f} us at {n}")
    return f" Of what it wins over 64 splits attention has {', '.join(said)}." if said else ""


def verify_attention(r: Result) -> list[str]:
    lacks = any("2 splits" not in c["us"] for c in r["layer"])
    other = read("verify_attention_splits") if lacks else None
    contexts = list(dict.fromkeys(n for row in r["steps"] for n in row["us"]))
    by = {row["case"]: row["us"] for row in r["steps"]}

    def gain(slow: str, fast: str) -> str:
        if slow not in by or fast not in by:
            return ""
        both = [n for n in contexts if n in by[slow] and n in by[fast]]
        return ", ".join(f"{by[slow][n] / by[fast][n]:.2f}x at {n}" for n in both)

    pairs = (
        ("torch's masked attention to 64 splits", "torch, masked", "64 splits"),
        ("16 to 64 splits", "16 splits", "64 splits"),
        ("value by value to 128-bit loads (16 splits)", "16 splits, value by value", "16 splits"),
        ("both", "16 splits, value by value", "64 splits"),
        ("not captured to captured", "64 splits, not captured", "64 splits"),
        ("Triton in torch to our phases", "64 splits", "ours"),
    )
    gains = [f"{what}: {said}" for what, slow, fast in pairs if (said := gain(slow, fast))]
    return [
        f"A step of the host's loop, {r['model']}, N = 16, us, by verify attention. What each "
        "change is worth end to end: " + "; ".join(gains) + ". So none of them is a factor that "
        "holds at every length. `ours` is the same loop around all of our phases, not attention "
        "alone." + _own_share(r, by),
        "",
        *table(
            ["", *contexts],
            [
                [row["case"], *(f"{row['us'][n]:.0f}" if n in row["us"] else "" for n in contexts)]
                for row in r["steps"]
            ],
        ),
        "",
        "One layer's attention of N tree rows alone, us: torch's with a mask, split-KV in Triton "
        "by number of splits and width of loads, and ours by splits (a hand-off between layers is "
        "in its figures; it cannot have more splits than fit the SMs, and no narrow loads).",
        *_verify_layers(_with_splits(r, other)),
        *(
            [
                "",
                "Triton's columns that this run lacked come from another one "
                f"({where(other)}); its kernels have not changed since.",
            ]
            if other is not None
            else []
        ),
    ]  # fmt: skip


def compaction(r: Result) -> list[str]:
    names = list(r["cases"][0]["us"])
    us = r["cases"][0]["us"]
    kernel = (
        f"The megakernel's phase takes {us['kernel']:.1f} us, {us['kernel, nothing']:.1f} where "
        "nothing moves."
        if "kernel" in us
        else ""
    )
    return [
        f"Moving the accepted path {list(r['path'])} to its places, all layers, us. It moves less "
        "than half a megabyte: what it costs is launches. A loop in Python over rows and layers "
        f"costs {us['a copy a row and layer'] / us['all layers at once']:.0f}x one gather and "
        "scatter, and a graph pays that even where there is nothing to move. " + kernel,
        "",
        *table(
            ["", "bytes", *names],
            [
                [c["model"], c["bytes_moved"], *(f"{c['us'][n]:.1f}" for n in names)]
                for c in r["cases"]
            ],
        ),
    ]


def marshaling(r: Result) -> list[str]:
    names = list(r["cases"][0]["us"])
    us = r["cases"][0]["us"]
    longest = [n for n in names if n.startswith("lists, mask")][-1]
    return [
        "A step's data to the host and back, us of wall time. Lists and a mask with a column for "
        "every position cost the most, and grow with the context; packed into one pinned copy each "
        f"way {us['pinned']:.0f} us are left at N = {r['cases'][0]['rows']}, {us['none']:.0f} of "
        f"them the wait itself (`none`). So marshaling is worth up to "
        f"{us[longest] - us['pinned']:.0f} us a step to who does it carelessly, and "
        f"{us['pinned'] - us['none']:.0f} us to who does it well; the megakernel carries nothing.",
        "",
        *table(
            ["rows", *names],
            [[c["rows"], *(f"{c['us'][n]:.0f}" for n in names)] for c in r["cases"]],
        ),
    ]


def chain_or_tree(r: Result) -> list[str]:
    best = max(r["policies"], key=lambda row: row["tok_s"])
    close = [p for p in r["policies"] if p is not best and p["against_best"]["low"] < 1.0]
    worse = [p["policy"] for p in r["policies"] if p["gain"] < 1]
    chain = next(p for p in r["policies"] if p["policy"] == "chain")
    lines = [
        f"{r['model']}, {r['prompts']} chat prompts, {r['tokens']} tokens each. A policy pays "
        f"where its tau is above its break-even. Best here: {best['policy']}, {best['gain']:.2f}x "
        f"plain decoding and {best['tok_s'] / chain['tok_s']:.2f}x the chain. "
        + (
            f"Too close to it to tell on so many prompts: {', '.join(p['policy'] for p in close)}."
            if close
            else "On so many prompts every other policy is slower beyond doubt."
        )
        + (f" **Slower than plain decoding**: {', '.join(worse)}." if worse else ""),
        "",
        *table(
            ["policy", "tau", "break-even tau", "step, us", "tok/s", "gain",
             "time over the best (95 %)"],
            [
                [p["policy"], f"{p['tau']:.2f}", f"{p['break_even']:.2f}", f"{p['step_us']:.0f}",
                 f"{p['tok_s']:.0f}", f"{p['gain']:.2f}",
                 f"{p['against_best']['low']:.3f} .. {p['against_best']['high']:.3f}"]
                for p in r["policies"]
            ],
        ),
    ]  # fmt: skip
    if r["by_context"]:
        names = list(r["by_context"][0]["break_even"])
        lines += [
            "",
            "Break-even tau by forced rejection, over the length of the context: what a step must "
            "commit there to be worth its time.",
            "",
            *table(
                ["context", *names[1:]],
                [
                    [row["context"], *(f"{row['break_even'][n]:.2f}" for n in names[1:])]
                    for row in r["by_context"]
                ],
            ),
        ]
    return lines


PAGES: dict[str, tuple[str, Callable[[Result], list[str]]]] = {
    "baseline_steps": ("Rivals: a step's time", baseline_steps),
    "pdl_steps": ("Against a graph of the same phases", pdl_steps),
    "context_sweep": ("Over the length of the context", context_sweep),
    "dram_trace": ("DRAM over time", dram_trace),
    "public_megakernel": ("Against the public megakernel for Llama-3.2-1B", public_megakernel),
    "host_stall": ("While the host stands still", host_stall),
    "step_breakdown": ("Where a host's loop spends its step", step_breakdown),
    "tree_build": ("Building the tree", tree_build),
    "chain_or_tree": ("Chain or tree", chain_or_tree),
    "verify_attention": ("Verify attention", verify_attention),
    "kv_fragmentation": ("Scattered pages", kv_fragmentation),
    "compaction": ("Compaction", compaction),
    "marshaling": ("Marshaling", marshaling),
}
