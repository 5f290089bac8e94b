"""The report's pictures, one message each, drawn from the result files; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.common import HATCHES, LINES, MARKS, RESULTS, keep, picture

Result = dict[str, Any]


def tree_build(r: Result) -> Any:
    figure, axes = picture(
        "No builder is hundreds of times faster than a heap in Python",
        "tree nodes B",
        "us per tree",
    )
    budgets = [row["budget"] for row in r["rows"]]
    for i, name in enumerate(r["rows"][0]["us"]):
        us = [row["us"].get(name) for row in r["rows"]]
        axes.loglog(budgets, us, LINES[i % 4], marker=MARKS[i % 6], color="black", label=name)
    axes.set_xticks(budgets, [str(b) for b in budgets])
    axes.minorticks_off()
    axes.legend(frameon=False)
    return figure


def baseline_steps(r: Result) -> Any:
    model, forms = next(iter(r["models"].items()))
    at = next(iter(next(iter(forms.values()))["steps"]))
    shown = {form: row["steps"][at] for form, row in forms.items() if at in row["steps"]}
    eager = shown.pop("eager", None)  # would leave no room for the others
    left_out = f"eager, {eager['us'] / 1e3:.0f} ms, left out" if eager else ""
    figure, axes = picture(
        f"Fusing moves more than the host: {model}, N = {r['rows']} at {at}",
        f"us per step; {left_out}" if left_out else "us per step", "", (7.2, 3.4),
    )  # fmt: skip
    names = list(shown)[::-1]
    total = [shown[n]["us"] for n in names]
    device = [min(sum(shown[n].get("graphs_us") or [0.0]), shown[n]["us"]) for n in names]
    axes.barh(names, device, color="0.35", label="device works")
    rest = [t - d for t, d in zip(total, device)]
    axes.barh(names, rest, left=device, color="white", edgecolor="black", hatch=HATCHES[1],
              label="the rest: host, gaps")  # fmt: skip
    axes.legend(frameon=False, loc="lower right")
    return figure


def context_sweep(r: Result) -> Any:
    figure, axes = picture(
        f"A step over the length of the context: {r['model']}, {r['rows']} rows",
        "context, positions", "us per step",
    )  # fmt: skip
    forms = list(dict.fromkeys(case["form"] for case in r["cases"]))
    for i, form in enumerate(forms):
        points = sorted((c["context"], c["us"]) for c in r["cases"] if c["form"] == form)
        axes.loglog(*zip(*points), LINES[i % 4], marker=MARKS[i % 6], color="black", label=form)
    contexts = sorted({c["context"] for c in r["cases"]})
    axes.set_xticks(contexts, [str(n) for n in contexts], fontsize=7)
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=7)
    return figure


def dram_trace(r: Result) -> Any:
    import matplotlib.pyplot as plt

    shown = [(m, f, row) for m, forms in r["models"].items() for f, row in forms.items()]
    figure, all_axes = plt.subplots(
        len(shown), 1, sharex=True, sharey=True, figsize=(7.2, 1.1 * len(shown) + 0.8)
    )
    places = all_axes.flat if len(shown) > 1 else [all_axes]
    for axes, (model, form, row) in zip(places, shown):
        for values, style in (
            (row["excerpt_dram"], dict(color="0.3")),
            (row.get("excerpt_tensor"), None),
        ):
            at = [i * r["interval_us"] for i in range(len(values or []))]
            if style is not None:
                axes.fill_between(at, values, step="post", lw=0, **style)
            elif values:
                axes.plot(at, values, color="black", lw=0.5, drawstyle="steps-post")
        axes.set_title(
            f"{model}, {form}: DRAM {row['dram']['mean_percent']:.0f} % in the mean",
            fontsize=8, loc="left",
        )  # fmt: skip
        axes.set_ylim(0, 100)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("us")
    figure.supylabel("% of the peak; grey: DRAM, line: tensor pipe", fontsize=8)
    figure.suptitle(f"{r['rows']} rows at {r['context']} positions", fontsize=10)
    return figure


def step_breakdown(r: Result) -> Any:
    """The hypotheses' traces; no picture where there are none, as of a CPU."""
    import matplotlib.pyplot as plt

    shown = {n: row for n, row in r.get("switches", {}).items() if "trace_dram" in row}
    if not shown:
        return None
    figure, all_axes = plt.subplots(
        len(shown), 1, sharey=True, figsize=(7.2, 1.1 * len(shown) + 0.8), squeeze=False
    )
    for axes, (name, row) in zip(all_axes.flat, shown.items()):
        dram = row["trace_dram"]
        ms = [us / 1e3 for us in dram["us"]]
        axes.fill_between(ms, dram["percent"], step="post", lw=0, color="0.3")
        if tensor := row.get("trace_tensor"):
            ms = [us / 1e3 for us in tensor["us"]]
            axes.plot(ms, tensor["percent"], color="black", lw=0.5, drawstyle="steps-post")
        flat = ", flat" if row.get("flat") else ""
        axes.set_title(f"{name}: {row['us'] / 1e3:.1f} ms a step{flat}", fontsize=8, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms, an axis of its own for each")
    figure.supylabel("% of the peak; grey: DRAM, line: tensor pipe", fontsize=8)
    figure.suptitle(f"Which trace is flat? {r['model']} at {r['context']} positions", fontsize=10)
    return figure


def pdl_steps(r: Result) -> Any:
    figure, axes = picture("A whole step: one kernel against a graph of the same phases", "",
                           "us per step")  # fmt: skip
    whole = r.get("whole", {})
    if not whole:
        return None
    cases = [(f"{m}\n{c['context']}", c) for m, cases in whole.items() for c in cases]
    for i, (form, fill) in enumerate((("kernel", "0.35"), ("graph_pdl", "white"))):
        x = [j + (i - 0.5) * 0.35 for j in range(len(cases))]
        axes.bar(x, [c[form]["us"] for _, c in cases], 0.35, color=fill, edgecolor="black",
                 hatch=HATCHES[i], label=form)  # fmt: skip
    axes.set_xticks(range(len(cases)), [name for name, _ in cases])
    axes.legend(frameon=False)
    return figure


def kv_fragmentation(r: Result) -> Any:
    model = r["cases"][-1]["model"]
    cases = [c for c in r["cases"] if c["model"] == model]
    figure, axes = picture(
        f"Pages of 64 need no defragmentation: {model}, {r['rows']} rows",
        "context, positions", "us per layer",
    )  # fmt: skip
    names = [n for n in cases[0]["us"] if "copy" not in n]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        x = [j + (i - (len(names) - 1) / 2) * width for j in range(len(cases))]
        fill = "0.35" if name.startswith("ours") else "white" if i else "0.7"
        axes.bar(x, [c["us"][name] for c in cases], width, color=fill,
                 edgecolor="black", hatch=HATCHES[i], label=name)  # fmt: skip
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), [str(c["context"]) for c in cases])
    axes.legend(frameon=False)
    return figure


def verify_attention(r: Result) -> Any:
    figure, axes = picture(
        f"What verify attention is worth end to end: {r['model']}, N = 16",
        "context, positions", "us per step",
    )  # fmt: skip
    for i, row in enumerate(r["steps"]):
        points = sorted((int(n), us) for n, us in row["us"].items())
        axes.loglog(*zip(*points), LINES[i % 4], marker=MARKS[i % 6], color="black",
                    mfc="white" if i > 3 else "black", label=row["case"])  # fmt: skip
    contexts = sorted({int(n) for row in r["steps"] for n in row["us"]})
    axes.set_xticks(contexts, [str(n) for n in contexts])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _bars(title: str, y: str, groups: dict[str, dict[str, float]]) -> Any:
    """Groups of bars on a logarithmic axis."""
    figure, axes = picture(title, "", y, (7.2, 3.4))
    names = list(dict.fromkeys(n for row in groups.values() for n in row))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        x = [j + (i - (len(names) - 1) / 2) * width for j in range(len(groups))]
        fill = "0.35" if name.startswith("kernel") else "white" if i else "0.7"
        axes.bar(x, [row.get(name, 0.0) for row in groups.values()], width, color=fill,
                 edgecolor="black", hatch=HATCHES[i % 8], label=name)  # fmt: skip
    axes.set_yscale("log")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.legend(frameon=False, fontsize=7)
    return figure


def compaction(r: Result) -> Any:
    return _bars("Moving four accepted rows costs launches, not bytes", "us per step",
                 {c["model"]: c["us"] for c in r["cases"]})  # fmt: skip


def marshaling(r: Result) -> Any:
    return _bars("Carrying a step's data: lists and full masks cost, one copy does not",
                 "us per step", {f"N = {c['rows']}": c["us"] for c in r["cases"]})  # fmt: skip


def chain_or_tree(r: Result) -> Any:
    figure, axes = picture(
        f"What a step commits, and what it must: {r['model']}", "", "tokens per step"
    )
    names = [p["policy"].replace("tree, ", "") for p in r["policies"]]
    axes.bar(names, [p["tau"] for p in r["policies"]], color="0.7", edgecolor="black", label="tau")
    axes.plot(names, [p["break_even"] for p in r["policies"]], "_", ms=28, mew=2, color="black",
              label="break-even")  # fmt: skip
    axes.legend(frameon=False)
    return figure


def host_stall(r: Result) -> Any:
    figure, axes = picture("What is kept of the rate while the host is disturbed", "", "%")
    contenders = r["contenders"]
    kinds = [k for k in next(iter(contenders.values())) if k != "none"]
    width = 0.8 / len(contenders)
    for i, (form, rows) in enumerate(contenders.items()):
        x = [j + (i - (len(contenders) - 1) / 2) * width for j in range(len(kinds))]
        fill = "0.35" if form == "megakernel" else "white"
        axes.bar(x, [100 * rows[k]["kept"] for k in kinds], width, color=fill, edgecolor="black",
                 hatch=HATCHES[i], label=form)  # fmt: skip
    axes.set_xticks(range(len(kinds)), kinds)
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def public_megakernel(r: Result) -> Any:
    figure, axes = picture(
        f"One row of {r['model']}: a step", "context, positions", "us per step", (4.2, 3.0)
    )
    names = [f"ours at {c['context']}" for c in r["cases"]]
    bars = [c["us"] for c in r["cases"]]
    if r["theirs_us"]:
        names, bars = [*names, "theirs"], [*bars, r["theirs_us"]]
    axes.bar(names, bars, 0.5, color="0.7", edgecolor="black")
    return figure


DRAWN: dict[str, Callable[[Result], Any]] = {
    "baseline_steps": baseline_steps, "tree_build": tree_build, "context_sweep": context_sweep,
    "dram_trace": dram_trace, "kv_fragmentation": kv_fragmentation, "chain_or_tree": chain_or_tree,
    "host_stall": host_stall, "verify_attention": verify_attention, "compaction": compaction,
    "marshaling": marshaling, "step_breakdown": step_breakdown, "pdl_steps": pdl_steps,
    "public_megakernel": public_megakernel,
}  # fmt: skip


def draw(name: str, result: Result) -> None:
    """Draw an experiment's picture, if its result has something to show."""
    figure = DRAWN[name.removesuffix("_cpu")](result)
    if figure is not None:
        keep(figure, name, RESULTS / f"{name}.json")
