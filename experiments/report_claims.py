"""What others have claimed or suspected about idle GPUs in speculative decoding, and what our own
figures say to it. Each line stands only where its result file does."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from experiments.report_pages import table

Result = dict[str, Any]
Read = Callable[[str], Result | None]

HOST, FUSED = "graph_host_tree", "graph_host_tree, split-KV, fused"


def tree(read: Read) -> str | None:
    built, steps = read("tree_build"), read("baseline_steps")
    if built is None or steps is None:
        return None
    row = next(r for r in built["rows"] if r["budget"] == built["beside"])
    heap = row["us"]["python heap + mask"]
    ratio = max(  # of the same work, no mask
        r["us"]["python heap"] / us
        for r in built["rows"] for name, us in r["us"].items() if "mask" not in name
    )  # fmt: skip
    forms = next(iter(steps["models"].values()))
    if HOST not in forms:
        return None
    step = next(iter(forms[HOST]["steps"].values()))["us"]
    said = (
        f"at most {ratio:.1f}x over a heap in Python, whatever the builder and B; at "
        f"B = {built['beside']} that heap, its mask included, is {heap / step:.1%} of a {HOST} "
        f"step, {heap:.0f} of {step:.0f} us"
    )
    sweep = read("context_sweep") or {"cases": []}
    ours = next((c for c in sweep["cases"] if c["form"] == "megakernel"), None)
    if ours is not None:
        tree_us, whole = ours["split_us"]["tree"], ours["us"]
        said += f"; ranks and tree inside the kernel take {tree_us:.0f} of {whole:.0f} us"
    return said + (". **Not the bottleneck**" if heap < 0.05 * step else ". **It matters here**")


def attention(read: Read) -> str | None:
    r = read("verify_attention")
    if r is None:
        return None
    by = {row["case"]: row["us"] for row in r["steps"]}
    slow, fast = by["torch, masked"], by["64 splits"]
    ratios = ", ".join(f"{slow[n] / fast[n]:.1f}x at {n}" for n in slow if n in fast)
    few = by["16 splits, value by value"]
    own = ", ".join(f"{few[n] / fast[n]:.2f}x at {n}" for n in fast)
    return (
        f"against torch's masked attention a whole step gains {ratios}; from 16 splits and scalar "
        f"loads to 64 splits and vector loads {own}. **It depends on the context**"
    )


def gaps(read: Read) -> str | None:
    r = read("step_breakdown")
    if r is None or "switches" not in r:
        return None
    rows = []
    for name, row in r["switches"].items():
        idle = ", ".join(
            f"{what} idle {row[key]['idle_share']:.0%}"
            for key, what in (("dram", "DRAM"), ("tensor", "tensor pipe"))
            if row.get(key)
        )
        if idle:
            rows.append(f"{name}: {row['us']:.0f} us a step, {idle}")
    if not rows:
        return None
    return "; ".join(rows) + ". **Idle samples alone do not name the cause**"


def fragmentation(read: Read) -> str | None:
    r = read("kv_fragmentation")
    if r is None:
        return None
    cost = [
        c["us"][f"{which}pages{of} shuffled"] / c["us"][f"{which}pages{of} in order"] - 1
        for c in r["cases"] for which, of in (("", " of 64"), ("ours, ", ""))
        if f"{which}pages{of} in order" in c["us"]
    ]  # fmt: skip
    verdict = "Nothing to win" if median(cost) < 0.02 else "Something to win"
    return (
        f"shuffling pages of 64 costs {median(cost):+.1%} of an attention layer in the median of "
        f"{len(cost)} cases, at most {max(cost):+.0%}. **{verdict}**"
    )


def marshaling(read: Read) -> str | None:
    r = read("marshaling")
    if r is None:
        return None
    us = r["cases"][0]["us"]
    lists = max(v for k, v in us.items() if k.startswith("lists"))
    return (
        f"up to {lists:.0f} us a step with lists and full masks, {us['pinned']:.0f} us packed, of "
        f"which {us['none']:.0f} are the wait. **True for careless code, and cheap to mend**"
    )


def equal_columns(read: Read) -> str | None:
    """Two forms of one loop, whose prompts take the same time."""
    r = read("context_sweep")
    if r is None:
        return None
    cases = {(c["form"], c["context"]): c for c in r["cases"] if "with_prefill_tok_s" in c}
    said = []
    for n in sorted({n for _, n in cases}):
        slow, fast = cases.get((HOST, n)), cases.get((FUSED, n))
        if slow and fast:
            bare = slow["us"] / fast["us"]
            whole = fast["with_prefill_tok_s"] / slow["with_prefill_tok_s"]
            said.append(f"{bare:.1f}x and {whole:.1f}x at {n}")
    if not said:
        return None
    return (
        f"{HOST} and its fused form differ in step time, and with the prompt's time in the "
        f"denominator, by {', '.join(said)}. **A common term hides the steps**"
    )


def stalls(read: Read) -> str | None:
    r = read("host_stall")
    if r is None:
        return None
    return (
        "; ".join(
            f"{form} keeps " + ", ".join(
                f"{row['kept']:.0%} ({name})" for name, row in rows.items() if name != "none"
            )
            for form, rows in r["contenders"].items()
        )
        + ". **What is host-driven loses what the host loses**"
    )  # fmt: skip


CLAIMS: tuple[tuple[str, Callable[[Read], str | None]], ...] = (
    ("A tree builder on the GPU is 474x faster than a heap in Python, and removes the gap", tree),
    ("A better verify attention makes decoding several times faster at every length", attention),
    ("Idle DRAM and tensor pipes show that the CPU is to blame", gaps),
    ("Scattered pages should be defragmented", fragmentation),
    ("Marshaling is worth optimising", marshaling),
    (
        "Two systems with the same tokens per second at long contexts are equally fast",
        equal_columns,
    ),
    ("A GPU that waits for Python stops when Python does", stalls),
)


def claims(read: Read) -> list[str]:
    """The table, or nothing without results."""
    rows = [(claim, said) for claim, say in CLAIMS if (said := say(read)) is not None]
    if not rows:
        return []
    return ["## What is claimed, and what the figures say", "", *table(["claim", "here"], rows)]
