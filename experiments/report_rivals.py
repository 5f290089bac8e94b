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
            lines += [
                "",
                f"With our phases the host's loop takes {a:.0f} us at {at}, and {b:.0f} where the "
                "tree and the walk are kernels of the graph too: the difference is the host's.",
            ]
    if "plain" in next(iter(r["models"].values())):
        lines += ["", "`plain` decodes one row a step, without a drafter."]
    if r["failed"]:
        lines += ["", "Failed: " + "; ".join(f"{k}: {v}" for k, v in r["failed"].items())]
    return lines


GOALS = {"smollm2-135m": 1.25, "llama-3.2-1b": 1.10}
"""What a whole step should gain over graph_pdl; at least 1.0 it must."""


def failures(r: Result) -> list[str]:
    """What did not run."""
    said = "; ".join(f"{form}: {why}" for form, why in r.get("failed", {}).items())
    return ["", f"Failed: {said}."] if said else []


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
        "programmatic, so that each streams weights before it waits. A graph still needs a host to "
        "replay it.",
        *whole_steps(r),
        "",
        f"A verify step from tokens to choices, us; the logits are compared bit for bit. {verdict}",
        "",
        *table(["step", *first, "graph_pdl / kernel", "same bits"], rows),
        *failures(r),
    ]


def whole_steps(r: Result) -> list[str]:
    """Whole speculative steps of both, and what the goals were."""
    rows, said = [], []
    for model, cases in r.get("whole", {}).items():
        for case in cases:
            kernel, graph, ratio = case["kernel"], case["graph_pdl"], case["graph_pdl / kernel"]
            parts = ", ".join(f"{k} {us:.0f}" for k, us in kernel["split_us"].items())
            rows.append(
                [
                    f"{model} at {case['context']}",
                    f"{kernel['us']:.1f}",
                    f"{kernel['tau']:.2f}",
                    parts,
                    f"{graph['us']:.1f}",
                    f"{graph['tau']:.2f}",
                    f"{ratio:.2f}",
                ]
            )
        least = min(case["graph_pdl / kernel"] for case in cases)
        goal = GOALS[model]
        end = (
            f"the goal of {goal:.2f}x is reached"
            if least >= goal
            else f"**the goal of {goal:.2f}x is missed**"
            if least >= 1
            else "**the graph is ahead**"
        )
        said.append(f"{model}: {least:.2f}x at least, {end}")
    if not rows:
        return []
    return [
        "",
        f"A whole speculative step of {r['rows']} rows, drafter, tree and walk included, us; "
        "acceptance scripted on both sides; the graph's trees, of random keys, are shallower, so "
        "that it commits fewer tokens a step, which can only favour its time. "
        f"{'; '.join(said)}.",
        "",
        *table(
            ["", "kernel", "tau", "of which", "graph_pdl", "tau", "graph_pdl / kernel"],
            rows,
        ),
    ]


def context_sweep(r: Result) -> list[str]:
    contexts = sorted({case["context"] for case in r["cases"]})
    by = {(case["form"], case["context"]): case for case in r["cases"]}
    forms = list(dict.fromkeys(case["form"] for case in r["cases"]))
    scripted = {c["context"] for c in r["cases"] if c.get("acceptance") == "scripted"}
    head = ["", *(f"{n}, scripted" if n in scripted else n for n in contexts)]

    def cell(form: str, n: int, key: str) -> str:
        value = by.get((form, n), {}).get(key)
        return "" if value is None else f"{value:.0f}"

    def rate(form: str, n: int) -> str:
        whole = cell(form, n, "with_prefill_tok_s")
        tau = by.get((form, n), {}).get("tau")
        said = cell(form, n, "tok_s") + (f" ({whole})" if whole else "")
        return said + (f", tau {tau:.2f}" if tau and n not in scripted else "")

    def where(form: str, n: int) -> str:
        case = by.get((form, n), {})
        if "split_us" in case:
            parts = case["split_us"]
            rest = case["us"] - sum(parts.values())
            return ", ".join(f"{k} {us:.0f}" for k, us in (parts | {"rest": rest}).items())
        if case.get("graphs_us"):
            device = min(sum(case["graphs_us"]), case["us"])
            return f"device {device:.0f}, rest {case['us'] - device:.0f}"
        return ""

    lines = [
        f"{r['model']}, {r['rows']} rows. Up to what the model was trained for all continue the "
        "same text and accept what their drafts are worth; beyond, acceptance is **scripted**: "
        f"tokens per second are those of {r['committed']} tokens a step for all. us a step:",
        "",
        *table(head, [[f, *(cell(f, n, "us") for n in contexts)] for f in forms]),
        "",
        "Tokens per second, and in brackets with the prompt's time in the denominator of a "
        f"request of {r['new_tokens']} tokens:",
        "",
        *table(head, [[f, *(rate(f, n) for n in contexts)] for f in forms]),
        "",
        "Where a step goes, us: the megakernel's own count; of the rivals the device's time of "
        "their graphs, replayed alone, and the rest, which is the host's and gaps:",
        "",
        *table(head, [[f, *(where(f, n) for n in contexts)] for f in forms]),
    ]
    if "megakernel" in forms:
        rows = [
            [form]
            + [
                f"{by[form, n]['us'] / by['megakernel', n]['us']:.1f} / "
                + (
                    f"{with_prompt(by['megakernel', n], by[form, n]):.1f}"
                    if "with_prefill_tok_s" in by[form, n]
                    else ""
                )
                if (form, n) in by and ("megakernel", n) in by
                else ""
                for n in contexts
            ]
            for form in forms
            if form != "megakernel"
        ]
        lines += [
            "",
            "How many times the megakernel's step time, and with the prompt in the denominator how "
            "many times slower in tokens per second:",
            "",
            *table(head, rows),
        ]
    prompts = [
        f"{n}: {by['megakernel', n]['prefill_s']:.2f} / {other['prefill_s']:.2f}"
        for n in contexts
        for other in [next((c for (f, m), c in by.items() if m == n and f != "megakernel"), {})]
        if "prefill_s" in other and "prefill_s" in by.get(("megakernel", n), {})
    ]
    if prompts:
        said = "; ".join(prompts)
        lines += ["", f"Seconds a prompt takes, the megakernel's / torch's: {said}."]
    lost = [
        f"{form} at {n} ({1 / ratio:.1f}x)"
        for (form, n), case in by.items()
        if "with_prefill_tok_s" in case and "with_prefill_tok_s" in by.get(("megakernel", n), {})
        if (ratio := with_prompt(by["megakernel", n], case)) < 1
    ]
    if lost:
        lines += [
            "",
            "**Where we lose**: with the prompt in the denominator, since a long prompt takes the "
            f"kernel longer than torch's flash attention: {'; '.join(lost)}.",
        ]
    return [
        *lines,
        "",
        "Equal columns of two contenders at a long context mean a common term, the prompt, not "
        "equal steps.",
        *failures(r),
    ]


def with_prompt(fast: Result, slow: Result) -> float:
    """Ratio of two cases' rates with the prompt's time in the denominator."""
    return float(fast["with_prefill_tok_s"] / slow["with_prefill_tok_s"])


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
                    f"{t['idle_share']:.0%}" if t else "",
                ]
            )  # fmt: skip
    plain = ", ".join(f"{k} {row['dram']['mean_percent']:.1f} %" for k, row in r["streams"].items())
    lines = [
        f"Counters every {r['interval_us']:.0f} us while decoding, {r['rows']} rows from "
        f"{r['context']} positions on. Plain streams of the same run: {plain} of the peak; the "
        f"share is that of the best, {stream:.1f} %. The tensor pipe is a second pass. A small "
        "model cannot fill the memory: its step is a chain of short phases, and **there the "
        "kernel leaves most of the bandwidth unused too**.",
        "",
        *table(
            ["", "DRAM, mean", "of the stream", "samples under 1 %", "longest gap, us",
             "SMs active", "tensor pipe", "its samples under 1 %"],
            rows,
        ),
    ]  # fmt: skip
    if (ours := r["models"].get("llama-3.1-8b", {}).get("megakernel")) is not None:
        d = ours["dram"]
        share = d["mean_percent"] / stream
        met = share >= 0.75 and d["idle_share"] <= 0.01 and d["longest_gap_us"] <= 25
        goal = share >= 0.9 and d["idle_share"] <= 0.003 and d["longest_gap_us"] <= 10
        lines += [
            "",
            "llama-3.1-8b, the bar of 75 % of the stream, 1 % of the samples under 1 % and no gap "
            f"over 25 us: {'met' if met else '**missed**'}; the goal of 90 %, 0.3 % and 10 us: "
            f"{'met' if goal else '**missed**'}.",
        ]
    if slots := r.get("phase_slots"):
        parts = "; ".join(
            f"{kind}: " + ", ".join(f"{part} {us:.2f}" for part, us in row.items())
            for kind, row in slots["phases"].items()
        )
        lines += [
            "",
            f"[{slots['file']}](results/{slots['file']}) opens in [Perfetto](https://ui.perfetto.dev):"
            f" a verify step of {slots['model']}, {slots['rows']} rows, {slots['step_us']:.0f} us, "
            "by the stamps that the kernel itself leaves, a track for every eleventh CTA, with the "
            f"counters above it (clock: {slots['clock']}). us of a phase, means over CTAs and "
            f"layers: {parts}.",
        ]
    return lines + failures(r)


def public_megakernel(r: Result) -> list[str]:
    cases = r["cases"]
    ours = "; ".join(
        f"at {c['context']} positions {c['us']:.0f} us a step, {c['tb_s']:.2f} TB/s of weights"
        for c in cases
    )
    said = f"{r['model']}, one row: {ours}. "
    if theirs := r["theirs_us"]:
        said += f"Theirs on the same machine: {theirs:.0f} us, {theirs / cases[0]['us']:.2f}x."
    else:
        said += (
            "**Theirs was not run here**: it needs weights that one has to ask for; how to build "
            "and time it stands in the script."
        )
    return [said]
