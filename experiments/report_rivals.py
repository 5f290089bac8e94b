"""The report's pages on rivals and the device over time; the others are in report_pages.

A page is a function of a result file's contents to Markdown lines. Figures in the prose are
computed; what is judged is said as it follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Result = dict[str, Any]


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Markdown."""
    lines = [f"| {' | '.join(map(str, head))} |", "|" + "---|" * len(head)]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def baseline_steps(r: Result) -> list[str]:
    lines = [
        f"Every rival decodes the same weights with the same drafter, {r['rows']} rows a step. "
        f"Wall time of a step that commits {r['committed']} tokens, and how much of it the device "
        "works (its graphs replayed alone); the rest is the host's.",
    ]
    for model, forms in r["models"].items():
        contexts = list(next(iter(forms.values()))["steps"])
        head = [model, *(f"us at {n}" for n in contexts), "device, us", "tau", "not fp32's choice"]
        rows = []
        for form, row in forms.items():
            steps = [row["steps"].get(n) for n in contexts]
            graphs = steps[0].get("graphs_us") if steps[0] else None
            text = row.get("text", {})
            rows.append(
                [
                    form,
                    *(f"{s['us']:.0f}" if s else "" for s in steps),
                    f"{sum(graphs):.0f}" if graphs else "",
                    f"{text['tau']:.2f}" if text else "",
                    f"{text['not_fp32_s_choice']} of {text['tokens']}, at gaps to "
                    f"{text['largest_gap']:.3f}"
                    if text
                    else "",
                ]
            )
        lines += ["", *table(head, rows)]
        host, fused = "graph_host_tree", "graph_host_tree, split-KV, fused"
        if host in forms and fused in forms:
            at = contexts[0]
            a, b = forms[host]["steps"][at]["us"], forms[fused]["steps"][at]["us"]
            lines += [
                "",
                f"At {at} positions fusing and split-KV attention take the host's loop from "
                f"{a:.0f} to {b:.0f} us: {a / b:.1f}x without touching the host. A comparison with "
                "the first form alone would flatter whoever makes it.",
            ]
        own, graph = "graph_host_tree, our phases", "graph_pdl"
        if own in forms and graph in forms:
            at = contexts[0]
            a, b = forms[own]["steps"][at]["us"], forms[graph]["steps"][at]["us"]
            lines[-1] += (
                f" With our phases in the same loop it takes {a:.0f} us, and {b:.0f} where the "
                "tree and the walk are kernels of the graph too: the difference is the host's."
            )
    if "plain" in next(iter(r["models"].values())):
        lines += ["", "`plain` decodes one row a step, without a drafter."]
    if r["failed"]:
        lines += ["", "Failed: " + "; ".join(f"{k}: {v}" for k, v in r["failed"].items())]
    return lines


def pdl_steps(r: Result) -> list[str]:
    rows, lost = [], []
    for model, cases in r["models"].items():
        for case in cases:
            us = case["us"]
            rows.append(
                [
                    f"{model}, {case['rows']} rows at {case['context']}",
                    *(f"{us[k]:.1f}" for k in us),
                    f"{case['graph_pdl / kernel']:.2f}",
                    "yes" if case["logits_equal"] else "NO",
                ]
            )
            if case["graph_pdl / kernel"] < 1:
                lost.append(rows[-1][0])
    first = next(iter(r["models"].values()))[0]["us"]
    verdict = (
        "The kernel is ahead in every case."
        if not lost
        else "**The graph is ahead** at " + "; ".join(lost) + "."
    )
    return [
        "The honest rival: the same phases, one kernel each, in a graph whose edges are "
        "programmatic, so that each streams weights before it waits. A verify step from tokens to "
        f"choices, us; the logits are compared bit for bit. {verdict} A graph still needs a host "
        "to replay it. (Whole speculative steps of both: above and below.)",
        "",
        *table(["step", *first, "graph_pdl / kernel", "same bits"], rows),
    ]


def context_sweep(r: Result) -> list[str]:
    contexts = sorted({case["context"] for case in r["cases"]})
    by = {(case["form"], case["context"]): case for case in r["cases"]}
    forms = list(dict.fromkeys(case["form"] for case in r["cases"]))

    def cell(form: str, n: int, key: str) -> str:
        value = by.get((form, n), {}).get(key)
        return "" if value is None else f"{value:.0f}"

    def rate(form: str, n: int) -> str:
        whole = cell(form, n, "with_prefill_tok_s")
        return cell(form, n, "tok_s") + (f" ({whole})" if whole else "")

    lines = [
        f"{r['model']}, {r['rows']} rows, acceptance {r['acceptance']}. us a step:",
        "",
        *table(["", *contexts], [[f, *(cell(f, n, "us") for n in contexts)] for f in forms]),
        "",
        "Tokens per second, and in brackets with the prompt's time in the denominator of a "
        f"request of {r['new_tokens']} tokens:",
        "",
        *table(
            ["", *contexts],
            [[f, *(rate(f, n) for n in contexts)] for f in forms],
        ),
    ]
    if "megakernel" in forms:
        ratios = [
            f"{by[form, n]['us'] / by['megakernel', n]['us']:.1f}x {form} at {n}"
            for form in forms if form != "megakernel"
            for n in contexts if (form, n) in by and ("megakernel", n) in by
        ]  # fmt: skip
        lines += ["", "The megakernel's step against: " + "; ".join(ratios) + "."]
    return [
        *lines,
        "",
        "Equal columns of two contenders at a long context mean a common term, the prompt, not "
        "equal steps.",
    ]


def dram_trace(r: Result) -> list[str]:
    # Over its active samples: a stream's own window may begin before it does.
    stream = max(
        d["mean_percent"] / (1 - d["idle_share"])
        for d in (row["dram"] for row in r["streams"].values())
    )
    rows = []
    for model, contenders in r["models"].items():
        for form, row in contenders.items():
            d, t = row["dram"], row.get("tensor")
            rows.append(
                [
                    f"{model}, {form}", f"{d['mean_percent']:.1f} %",
                    f"{d['mean_percent'] / stream:.1%}", f"{d['idle_share']:.2%}",
                    f"{d['longest_gap_us']:.0f}",
                    f"{row['sm_active']['mean_percent']:.0f} %",
                    f"{t['mean_percent']:.1f} %" if t else "",
                ]
            )  # fmt: skip
    lines = [
        f"Counters every {r['interval_us']} us while decoding, {r['rows']} rows from "
        f"{r['context']} positions on. The best plain stream of the same run comes to "
        f"{stream:.1f} % of the peak while it runs. A small model cannot fill the memory: its "
        "step is a chain of short phases.",
        "",
        *table(
            ["", "DRAM, mean", "of the stream", "samples under 1 %", "longest gap, us",
             "SMs active", "tensor pipe"],
            rows,
        ),
    ]  # fmt: skip
    if r["failed"]:
        lines += ["", "Failed: " + "; ".join(f"{k}: {v}" for k, v in r["failed"].items()) + "."]
    return lines


def public_megakernel(r: Result) -> list[str]:
    lines = [
        f"{r['model']}, one row at {r['context']} positions: {r['ours_us']:.0f} us a step, "
        f"{r['ours_tb_s']:.2f} TB/s of weights."
    ]
    if theirs := r["theirs_us"]:
        lines[0] += f" Theirs on the same machine: {theirs:.0f} us, {theirs / r['ours_us']:.2f}x."
    return lines


def host_stall(r: Result) -> list[str]:
    first = next(iter(r["contenders"].values()))
    return [
        f"{r['model']}, {r['rows']} rows: tokens per second while the host is disturbed, and the "
        "share of the undisturbed rate that is kept. Compare the shares: the rivals' steps commit "
        "a fixed number of tokens, the megakernel's what its drafter is worth on its text.",
        "",
        *table(
            ["", *first],
            [
                [form, *(f"{row['tok_s']:.0f} ({row['kept']:.1%})" for row in rows.values())]
                for form, rows in r["contenders"].items()
            ],
        ),
    ]


def step_breakdown(r: Result) -> list[str]:
    host = r["host_us"]
    total = sum(host.values())
    lines = [
        f"`{r['form']}`, {r['model']} at {r['context']} positions, {r['rows']} rows: "
        f"{r['us']:.0f} us a step.",
        "",
        *table(
            ["host's clock", "us", "share"],
            [[k, f"{v:.0f}", f"{v / total:.1%}"] for k, v in host.items()],
        ),
    ]
    if "idle_us" in r:
        graphs = ", ".join(f"{k} {v:.0f} us" for k, v in r["graphs_us"].items())
        lines += [
            "",
            f"On the device: {graphs}; idle {r['idle_us']:.0f} us, {r['idle_us'] / r['us']:.0%}.",
            "",
            *table(
                ["one thing changed", "us a step", "DRAM, mean", "idle samples", "longest gap"],
                [
                    [name, f"{row['us']:.0f}"]
                    + (
                        [f"{d['mean_percent']:.1f} %", f"{d['idle_share']:.0%}",
                         f"{d['longest_gap_us']:.0f} us"]
                        if (d := row["dram"])
                        else ["", "", ""]
                    )
                    for name, row in r["switches"].items()
                ],
            ),
            "",
            "Idle samples say that nobody asks for memory, not why: the host's clock says that.",
        ]  # fmt: skip
    if "engine_us" in r:
        stages = ", ".join(f"{k} {v:.0f} us" for k, v in r["engine_us"].items())
        lines += ["", f"The CPU device's own loop at the same size: {stages}."]
    return lines
