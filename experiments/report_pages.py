"""The report's pages: for each experiment what it shows, a table, and where we lose.

A page is a function of a result file's contents to Markdown lines. Figures in the prose are
computed; what is judged is said as it follows from them.
"""

from __future__ import annotations

from collections.abc import Callable

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


def tree_build(r: Result) -> list[str]:
    names = list(r["rows"][0]["us"])
    rows = [
        [row["budget"], *(f"{row['us'][n]:.1f}" for n in names),
         f"{row['us']['python heap'] / min(row['us'].values()):.0f}x"]
        for row in r["rows"]
    ]  # fmt: skip
    us = r["rows"][1]["us"]["python heap + mask"]
    shares = [  # of the machine's own steps
        f"{us / step:.2%} of {name} ({step:.0f} us)"
        for name, step in r["step_us"].items()
        if name.startswith("CPU device") == (r["device"] == "cpu")
    ]
    return [
        f"One tree of B nodes over {r['depth']} drafted positions, us; the builders' trees are the "
        f"same. A heap in Python, its mask included, takes {us:.0f} us at "
        f"B = {r['rows'][1]['budget']}"
        + (", which is " + "; ".join(shares[:6]) + "." if shares else ".")
        + " Whatever a faster builder is worth in a micro-benchmark, it buys that share of a step.",
        "",
        *table(["B", *names, "python heap / fastest"], rows),
    ]


def kv_fragmentation(r: Result) -> list[str]:
    names = list(r["cases"][0]["us"])

    def worst(of: str, over: str) -> float:
        return max(c["us"][of] / c["us"][over] for c in r["cases"])

    shuffled = worst("pages of 64 shuffled", "pages of 64 in order")
    single = worst("single rows shuffled", "pages of 64 in order")
    paged = worst("pages of 64 in order", "contiguous")
    return [
        f"One layer's attention of {r['rows']} rows, us. Over pages of 64 that lie in order, the "
        f"same pages shuffled cost at most {shuffled - 1:+.0%}, single rows all over the pool "
        f"{single - 1:+.0%}: that is all a defragmentation could win. What this kernel pays for, "
        f"up to {paged:.1f}x contiguous keys, is looking a page up for every key, in order or not; "
        "a kernel that copies whole pages looks up one in 64.",
        "",
        *table(
            ["", *names],
            [
                [f"{c['model']} at {c['context']}", *(f"{c['us'][n]:.1f}" for n in names)]
                for c in r["cases"]
            ],
        ),
    ]


def verify_attention(r: Result) -> list[str]:
    names = list(r["layer"][0]["us"])
    contexts = list(dict.fromkeys(n for row in r["steps"] for n in row["us"]))
    return [
        "One layer's attention of N tree rows, us: torch's with a mask against split-KV by number "
        "of splits and width of loads.",
        "",
        *table(
            ["", *names],
            [
                [f"{c['model']}, N = {c['rows']} at {c['context']}"]
                + [f"{c['us'][n]:.1f}" for n in names]
                for c in r["layer"]
            ],
        ),
        "",
        f"The same choices in a whole step of the host's loop, {r['model']}, us:",
        "",
        *table(
            ["", *contexts],
            [
                [row["case"], *(f"{row['us'][n]:.0f}" if n in row["us"] else "" for n in contexts)]
                for row in r["steps"]
            ],
        ),
    ]


def compaction(r: Result) -> list[str]:
    names = list(r["cases"][0]["us"])
    return [
        f"Moving the accepted path {list(r['path'])} to its places, all layers, us. It moves less "
        "than half a megabyte: what it costs is launches, and a graph pays them even where there "
        "is nothing to move.",
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
    return [
        "A step's data to the host and back, us of wall time. Lists and a mask with a column for "
        "every position cost the most, and grow with the context; packed into one pinned copy each "
        "way little is left but the wait itself (`none`).",
        "",
        *table(
            ["rows", *names],
            [[c["rows"], *(f"{c['us'][n]:.0f}" for n in names)] for c in r["cases"]],
        ),
    ]


def chain_or_tree(r: Result) -> list[str]:
    best = max(r["policies"], key=lambda row: row["tok_s"])
    return [
        f"{r['model']}, {r['prompts']} chat prompts, {r['tokens']} tokens each. A policy pays "
        f"where its tau is above its break-even. Best here: {best['policy']}, {best['gain']:.2f}x "
        "plain decoding.",
        "",
        *table(
            ["policy", "tau", "break-even tau", "step, us", "tok/s", "gain"],
            [
                [p["policy"], f"{p['tau']:.2f}", f"{p['break_even']:.2f}", f"{p['step_us']:.0f}",
                 f"{p['tok_s']:.0f}", f"{p['gain']:.2f}"]
                for p in r["policies"]
            ],
        ),
    ]  # fmt: skip


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
