"""The sections of docs/figures.md, one a result file or two; an absent file gives none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

from megadecode.training.card import tau_table

SHIPPED = Path(__file__).parent.parent / "megadecode" / "drafter" / "shipped"
RESULTS = Path(__file__).parent / "results"


def read(name: str) -> dict[str, Any] | None:
    """A result file, or None when it has not been made."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def where(result: dict[str, Any]) -> str:
    cpu = result.get("cpu", "")
    busy = result.get("device") == "cpu" and result.get("load", 0) > result.get("cpus", 1)
    beside = f", other work beside it (load {result['load']})" if busy else ""
    return (
        f"{cpu + ', ' if cpu else ''}{result['date'][:10]}, revision {result['revision']}{beside}"
    )


def cpu_speed() -> list[str]:
    """Decode speed against the rivals: medians of ratios of neighbouring turns."""
    result = read("cpu_speed")
    if result is None:
        return []
    turns = len(next(iter(result["tok_s"].values())))
    lines = [
        f"**Plain greedy decode, {result['model']}, {result['threads']} threads** "
        f"({where(result)}; {turns} alternating turns of {result['new_tokens']} "
        f"tokens; float32 sides agree on every token: "
        f"{'yes' if result['float32_sides_agree'] else 'no'}).",
        "",
        "| against | ours / rival, median | per turn | our tok/s, median |",
        "|---|---|---|---|",
    ]
    for bar in result["bars"]:
        ratios = " ".join(f"{ratio:.2f}" for ratio in bar["ratios"])
        rate = median(result["tok_s"][bar["ours"]])
        lines.append(
            f"| {bar['rival']} (ours: {bar['ours']}) | {bar['median']:.2f} | "
            f"{ratios} | {rate:.0f} |"
        )
    return lines


def ping() -> list[str]:
    """The loop's ear."""
    result = read("ping")
    if result is None:
        return []
    f = result["figures"]
    return [
        f"**Host to loop and back** ({where(result)}): {f['spinning_median_us']:.2f} us median "
        f"with both sides spinning, {f['after_1s_idle_median_us']:.0f} us median and "
        f"{f['after_1s_idle_max_us']:.0f} us at most after a second of idleness."
    ]


def speculation() -> list[str]:
    """A step by stage."""
    result = read("speculation_cost")
    if result is None:
        return []
    stages = list(result["steps"][0]["us"])
    lines = [
        f"**A speculative step by stage**, us, {result['model']} at {result['context']} positions, "
        f"drafter with {result['drafter']} ({where(result)}). Break-even: tokens a step must "
        "commit to be worth it.",
        "",
        f"| verify rows | step | break-even | {' | '.join(stages)} |",
        "|---|---|---|" + "---|" * len(stages),
    ]
    for step in result["steps"]:
        cells = " | ".join(f"{step['us'][stage]:.0f}" for stage in stages)
        lines.append(
            f"| {step['rows']} | {step['step_us']:.0f} | {step['break_even_tau']:.2f} | {cells} |"
        )
    trees = ", ".join(f"{name}: {us:.1f}" for name, us in result["tree_build_us"].items())
    return [*lines, "", f"Building one tree, us: {trees}."]


def drafter() -> list[str]:
    """The shipped drafter: what it is worth, and what it brings on the CPU."""
    record = SHIPPED / "smollm2-135m.json"
    if not record.exists():
        return []
    run = json.loads(record.read_text(encoding="utf-8"))
    lines = [
        f"**The drafter of smollm2-135m** ({run['drafter']['layers']} layers, blocks of "
        f"{run['drafter']['block_size']}; trained {run['seconds']:.0f} s on one {run['device']}). "
        "Tokens committed per verify step along the engine's own walk over held-out texts; N: rows "
        "of a tree.",
        "",
        *tau_table(run["tables"], by="margins"),
    ]
    if speed := read("drafter_speed"):
        lines += [
            "",
            f"On {speed['threads']} threads, default settings, alternating with speculation off on "
            f"{len(speed['turns'])} chat prompts: **{speed['ratio']:.2f}x** tokens per second over "
            f"all, {speed['median_ratio']:.2f}x in the median prompt, text identical, speculating "
            f"in {speed['share_of_steps_that_speculate']:.0%} of steps ({where(speed)}).",
        ]
    if tau := read("drafter_tau"):
        worst = max(abs(case["difference"]) for case in tau["cases"])
        lines += [
            "",
            f"The evaluator's tau and the engine's on {tau['prompts']} prompts differ by "
            f"{worst:.2%} at most ({where(tau)}).",
        ]
    if llama := read("drafter_llama"):
        ours, theirs = (llama["accepted_per_draft"][side] for side in ("ours", "theirs"))
        lines += [
            "",
            f"The exported drafter in llama.cpp on {len(llama['turns'])} prompts: {theirs:.3f} "
            f"tokens accepted per draft, our chain {ours:.3f} ({where(llama)}).",
        ]
    return lines


def gpu_steps() -> list[str]:
    """Decode steps of the persistent kernel."""
    result = read("gpu_steps")
    if result is None:
        return []
    origin, kernels = result["provenance"], result["kernels"]
    models = {name: row for name, row in kernels.items() if "phases" not in row}
    cases = [(s["context"], s["rows"]) for s in next(iter(models.values()))["steps"]]
    heads = " | ".join(f"{rows} row{'s' * (rows > 1)} at {context}" for context, rows in cases)
    lines = [
        f"**A decode step of the persistent kernel**, us, {origin['gpu']}, random "
        f"weights in bf16; rows of one sequence behind so many positions "
        f"({where(origin)}). Where a table of speculative steps is of a later revision, its rows "
        "of N = 1 are what the later kernel takes.",
        "",
        f"| model | weights, GB | {heads} |",
        "|---|---|" + "---|" * len(cases),
    ]
    for name, row in models.items():
        if not name.endswith("-matrices"):
            cells = " | ".join(f"{step['us']:.0f}" for step in row["steps"])
            lines.append(f"| {name.removeprefix('timed-')} | {row['weights GB']:.2f} | {cells} |")
    return lines


def gpu_speculation() -> list[str]:
    """A speculative step of the persistent kernel, by part, and what it gives."""
    result = read("gpu_speculation")
    if result is None:
        return []
    lines = [
        f"**A speculative step of the persistent kernel**, us, {result['gpu']} ({where(result)}; "
        "`python -m experiments.gpu_speculation`). N: rows, 1 is plain decoding. Candidates are "
        f"**{result['acceptance']}**, whatever the drafter; the shipped drafter's own where it "
        "says so, on 32 chats of 128 tokens. All give plain decoding's bits.",
        "",
        "| model, context | N | draft | tree | verify | decide | compact | step | tau | tok/s | "
        "times plain |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    tables = [
        (f"{name}, {context}", table)
        for name, model in result["models"].items()
        for context, table in model["contexts"].items()
    ]
    if chats := result.get("chats_with_the_shipped_drafter"):
        tables.append(("smollm2-135m, chats, shipped drafter", chats))
    for title, table in tables:
        for rows, r in table.items():
            parts = " | ".join(f"{us:.1f}" for us in r["us"].values())
            lines.append(
                f"| {title} | {rows} | {parts} | {r['step_us']:.0f} | {r['tau']:.2f} | "
                f"{r['tok_s']:.0f} | {r['speedup']:.2f} |"
            )
    return lines


def gpu_attention() -> list[str]:
    """A layer's attention alone, and what its canonical order costs."""
    result = read("attention_layers")
    if result is None:
        return []
    origin = result["provenance"]
    rows: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for label, figures in result["layers"].items():
        model, context, count = re.split(r", context |, rows ", label)
        rows.setdefault((model, int(count)), {})[int(context)] = figures
    contexts = list(next(iter(rows.values())))
    heads = " | ".join(f"at {context}" for context in contexts)
    longest = contexts[-1]
    lines = [
        f"**A layer's attention in the persistent kernel**, us, {origin['gpu']} ({where(origin)}; "
        "`python -m experiments.attention_layers`). A hand-off to the next layer is in every "
        "figure. Canonical order over one merge: how long it takes beside the same kernel without "
        "an order to keep, whose keys are all in masked blocks.",
        "",
        f"| model, rows | {heads} | GB/s of KV at {longest} | canonical order / one merge |",
        "|---|" + "---|" * (len(contexts) + 2),
    ]
    for (model, count), by_context in rows.items():
        us = " | ".join(f"{figures['canonical']:.1f}" for figures in by_context.values())
        ratios = [figures["of one merge"] for figures in by_context.values()]
        lines.append(
            f"| {model}, {count} | {us} | {by_context[longest]['GB/s']} | {min(ratios):.2f} to "
            f"{max(ratios):.2f} |"
        )
    return lines


def gpu_truth() -> list[str]:
    """How close the kernel is to fp32, and how little it needs the host."""
    lines: list[str] = []
    if result := read("gpu_accuracy"):
        forced, free = result["teacher_forced"], result["free_running"]
        lines += [
            f"**Against fp32** ({result['gpu']}, {result['model']} with its real weights, "
            f"{result['prompts']} texts of {result['new_tokens']} tokens written by the fp32 "
            f"model; {where(result)}).",
            "",
            "| side | steps of another top-1 | largest gap there | relative L2 of logits |",
            "|---|---|---|---|",
        ]
        for name, side, error in (
            ("kernel", forced["kernel"], forced["kernel"]["relative_l2"]),
            (
                "torch bf16",
                forced["torch_bf16"],
                forced["torch_bf16_relative_l2_of_the_kernels_steps"],
            ),
        ):
            lines.append(
                f"| {name} | {side['differences']} of {side['steps']} | {side['largest_gap']:.3f} "
                f"| {error:.2e} |"
            )
        lines += [
            "",
            f"Free-running through the rings, {free['equal']} of {result['prompts']} answers equal "
            f"the fp32 model's to the end; the others leave it at gaps of up to "
            f"{free['largest_gap']:.3f}.",
        ]
    if result := read("host_stop"):
        calls, calm, stopped = result["calls"], result["undisturbed"], result["stopped"]
        counted = ""
        if calls is not None:
            counted = (
                f"{calls['calls']} driver or runtime calls while the device wrote "
                f"{calls['tokens']} tokens (CUPTI; {calls['calls_at_start']} at the start). "
            )
        lines += [
            "",
            f"**The host out of the loop** ({result['gpu']}, {result['model']}; {where(result)}): "
            f"{counted}With the host process "
            f"stopped for {result['stopped_s']:.1f} s the longest step of {result['tokens']} took "
            f"{stopped['largest_us']:.0f} us, undisturbed {calm['largest_us']:.0f} us (median "
            f"{calm['median_us']:.0f} us, contexts up to 20k); tokens equal: "
            f"{'yes' if result['same_tokens'] else 'NO'}.",
        ]
    return lines


def handoffs() -> list[str]:
    """The study behind the GPU kernel."""
    result = read("handoffs")
    if result is None:
        return []
    shown = {
        "llama-128": "llama-3.2-1b shapes, 16 rows, GEMMs of 16 layers and head",
        "llama-1k": "the same with attention over 1k positions",
        "smol-132": "SmolLM2-135M shapes, 16 rows, GEMMs of 30 layers and head",
    }
    origin = result["provenance"]
    lines = [
        f"**Kernel skeletons on one {origin['gpu']}** "
        f"({where(result['provenance'])}; what they are and what bounds them: "
        "[experiments/handoffs](../experiments/handoffs/README.md)).",
        "",
        "| step | us |",
        "|---|---|",
    ]
    for name, what in shown.items():
        if name in result["variants"]:
            lines.append(f"| {what} | {result['variants'][name]['us']:.1f} |")
    return lines
