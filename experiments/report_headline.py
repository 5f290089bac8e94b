"""The README's figures: one table, one picture, where we lose; everything else is in
docs/figures.md and experiments/REPORT.md."""

from __future__ import annotations

from typing import Any

from experiments.report_rivals import Result, table
from experiments.report_sections import read, where

HOST, FUSED, PDL = "graph_host_tree", "graph_host_tree, split-KV, fused", "graph_pdl"
OURS = "megakernel"
SHOWN = {
    OURS: "megakernel",
    PDL: "graph_pdl: our phases as kernels of one graph",
    FUSED: "host's loop, fused kernels, split-KV attention",
    HOST: "host's loop as it is commonly written",
}
COMMITTED = 4
Steps = dict[tuple[str, int], dict[str, float]]


def steps() -> Steps:
    """us of a speculative step: {(model, context): {contender: us}}."""
    out: Steps = {}
    if rivals := read("baseline_steps"):
        for model, forms in rivals["models"].items():
            for form, row in forms.items():
                for n, step in row["steps"].items():
                    out.setdefault((model, int(n)), {})[form] = step["us"]
    whole: dict[str, Any] = (read("pdl_steps") or {}).get("whole", {})
    for model, cases in whole.items():
        for case in cases:
            found = out.setdefault((model, case["context"]), {})
            found |= {OURS: case["kernel"]["us"], PDL: case["graph_pdl"]["us"]}
    if not whole and (sweep := read("context_sweep")):
        for case in sweep["cases"]:
            if case["form"] == OURS and (sweep["model"], case["context"]) in out:
                out[sweep["model"], case["context"]][OURS] = case["us"]
    return {at: found for at, found in out.items() if OURS in found}


def _table(found: Steps) -> list[str]:
    def cell(us: dict[str, float], form: str) -> str:
        if form not in us:
            return ""
        ratio = f" ({us[form] / us[OURS]:.2f}x)" if form != OURS else ""
        return f"{us[form]:.0f} us, {COMMITTED * 1e6 / us[form]:,.0f} tok/s{ratio}"

    return table(
        [
            f"N = 16; tok/s as if all steps committed {COMMITTED}",
            *(f"{m} at {n}" for m, n in found),
        ],
        [[name, *(cell(us, form) for us in found.values())] for form, name in SHOWN.items()],
    )


def _dram(r: Result) -> list[str]:
    contenders = r["models"].get("llama-3.1-8b", {})
    if OURS not in contenders:
        return []

    def said(row: Result) -> str:
        d = row["dram"]
        return (
            f"{d['of_the_stream']:.0%} of what a pure stream reads, {d['idle_share']:.2%} of the "
            f"samples under 1 %, longest gap {d['longest_gap_us']:.0f} us"
        )

    line = f"- DRAM, llama-3.1-8b at {r['context']} positions: {said(contenders[OURS])}"
    if HOST in contenders:
        line += f"; the host's loop: {said(contenders[HOST])}"
    if PDL not in contenders:
        line += "; graph_pdl was not traced at this model"
    return [f"{line} ({where(r)}; `python -m experiments.dram_trace`)."]


def _stall(r: Result) -> list[str]:
    other = r.get("revisions", {})  # of contenders that another run's figures stand for
    cells = ", ".join(
        f"{form} {rows['frozen']['kept']:.1%}"
        + (f" (revision {other[form]})" if other.get(form, r["revision"]) != r["revision"] else "")
        for form, rows in r["contenders"].items()
        if form in (OURS, PDL, HOST)
    )
    return [
        f"- Rate kept while the host is stopped half of the time: {cells} ({where(r)}; "
        "`python -m experiments.host_stall`)."
    ]


def _drafter() -> list[str]:
    out = []
    if r := read("chain_or_tree"):
        best = max(r["policies"], key=lambda row: row["tok_s"])
        out.append(
            f"- The shipped drafter on {r['prompts']} chats, {r['device']}: tau {best['tau']:.2f} "
            f"with {best['policy']}, {best['gain']:.2f}x plain decoding ({where(r)}; "
            "`python -m experiments.chain_or_tree`)."
        )
    if r := read("drafter_speed"):
        out.append(
            f"- The same on {r['threads']} CPU threads, {len(r['turns'])} chats: {r['ratio']:.2f}x "
            f"plain decoding ({where(r)}; `python -m experiments.drafter_speed`)."
        )
    return out


def losses(found: Steps) -> list[str]:
    """Where a rival is ahead, or we are far from what we want."""
    out = []
    ratio = {at: us[PDL] / us[OURS] for at, us in found.items() if PDL in us}
    behind = [f"{m} at {n} ({r:.2f}x)" for (m, n), r in ratio.items() if r < 1]
    if behind:
        out.append(f"graph_pdl is ahead at {'; '.join(behind)}")
    elif ratio:
        (model, n), least = min(ratio.items(), key=lambda item: item[1])
        out.append(f"the lead over graph_pdl is {least - 1:.0%} at {model}, {n} positions")
    if r := read("pdl_steps"):
        cases = [(c["graph_pdl / kernel"], m, c) for m, row in r["models"].items() for c in row]
        least, model, case = min(cases, key=lambda found: found[0])
        at = f"{model}, {case['rows']} rows at {case['context']}"
        out.append(f"of the verify step alone graph_pdl takes {least:.2f}x ours at {at}")
    if r := read("gpu_speculation"):
        tables = {f"{m}": t["contexts"] for m, t in r["models"].items()}
        more = [
            f"{rows['32']['step_us'] / rows['16']['step_us']:.1f} ({model})"
            for model, contexts in tables.items()
            for rows in list(contexts.values())[:1]
            if "32" in rows and "16" in rows
        ]
        if more:
            out.append(f"a step of 32 rows lasts as long as {', '.join(more)} of 16 rows")
    if (r := read("dram_trace")) and OURS in r["models"].get("smollm2-135m", {}):
        share = r["models"]["smollm2-135m"][OURS]["dram"]["of_the_stream"]
        out.append(f"SmolLM2 keeps DRAM at {share:.0%} of the stream: its phases are too short")
    if r := read("host_stall"):
        low = [
            f"{kind} {row['kept']:.1%}"
            for kind, row in r["contenders"].get(OURS, {}).items()
            if row["kept"] < 0.99
        ]
        if low:
            out.append(f"not all of the rate is kept with {', '.join(low)}")
    if r := read("context_sweep"):
        took = {(c["form"], c["context"]): c.get("prefill_s") for c in r["cases"]}
        last = max((n for (form, n), s in took.items() if form == OURS and s), default=0)
        if own := took.get((OURS, last)):
            rivals = [s for (form, n), s in took.items() if n == last and form != OURS and s]
            said = f", the rivals' torch {min(rivals):.1f} s" if rivals else ""
            if not rivals or min(rivals) < own:
                out.append(f"a prompt of {last} tokens takes {own:.1f} s{said}")
        out += sweep_losses(r)
    return out


def sweep_losses(r: Result) -> list[str]:
    """Against graph_pdl in tokens a second: where the drafter's own acceptance makes the least of
    the step's lead, and what a long prompt leaves of it."""
    cases = {(c["form"], c["context"]): c for c in r["cases"]}
    both = [(cases[OURS, n], c) for (form, n), c in cases.items()
            if form == PDL and (OURS, n) in cases]  # fmt: skip
    out = []
    own = [(a, b) for a, b in both if a["acceptance"] == "drafter"]
    if own:
        a, b = min(own, key=lambda pair: pair[0]["tok_s"] / pair[1]["tok_s"])
        out.append(
            f"on texts of its own the lead over graph_pdl in tok/s falls to "
            f"{a['tok_s'] / b['tok_s']:.2f}x at {a['context']} positions (tau {a['tau']:.2f} "
            f"against {b['tau']:.2f})"
        )
    late = [(a["with_prefill_tok_s"] / b["with_prefill_tok_s"], a["context"]) for a, b in both]
    if late and min(late)[0] < 1:
        out.append(f"with the prompt's time it is {min(late)[0]:.1f}x at {min(late)[1]}")
    return out


def headline() -> list[str]:
    """All of it, in Markdown."""
    found = steps()
    lines: list[str] = []
    if found:
        rivals, ours = read("baseline_steps"), read("pdl_steps") or {}
        assert rivals is not None
        own = ours if "whole" in ours else read("context_sweep") or {}
        command = "pdl_steps" if own is ours else "context_sweep"
        graph = " and graph_pdl" if own is ours else ""
        lines += [
            f"**A speculative step on one {rivals['device']}**; in brackets how much longer it "
            f"takes than the megakernel's (rivals: {where(rivals)}, `python -m "
            f"experiments.baseline_steps`; megakernel{graph}: {where(own)}, `python -m "
            f"experiments.{command}`).",
            "",
            *_table(found),
            "",
        ]
        if lost := losses(found):
            lines += [f"**Where we lose**: {'; '.join(lost)}.", ""]
    for name, say in (("dram_trace", _dram), ("host_stall", _stall)):
        if (r := read(name)) is not None:
            lines += say(r)
    lines += _drafter()
    return [
        *lines,
        "",
        "![DRAM over time: host's loop, graph, megakernel](experiments/pictures/dram_trace.svg)",
        "",
        "Every other figure: [docs/figures.md](docs/figures.md). Rivals, traces and what was "
        "claimed elsewhere: [experiments/REPORT.md](experiments/REPORT.md).",
    ]
