"""The report's pages on the host: what its stalls cost, and what a step's time can be blamed on."""

from __future__ import annotations

from experiments.report_rivals import Result, failures, table


def host_stall(r: Result) -> list[str]:
    contenders = r["contenders"]
    first = next(iter(contenders.values()))
    lines = [
        f"{r['model']}, {r['rows']} rows: tokens per second while the host is disturbed, and the "
        "share of the undisturbed rate that is kept. Compare the shares: the rivals' steps commit "
        "a fixed number of tokens, the megakernel's what its drafter is worth on its text. The "
        "megakernel's rate is by the device's own time stamps, over the same steps of the same "
        "text in every turn.",
        "",
        *table(
            ["", *first],
            [
                [form, *(f"{row['tok_s']:.0f} ({row['kept']:.1%})" for row in rows.values())]
                for form, rows in contenders.items()
            ],
        ),
    ]
    for form, source in r.get("sources", {}).items():
        lines += ["", f"{form}: {source}"]
    ours = contenders.get("megakernel", {})
    if ours:
        worst = max(abs(1 - row["kept"]) for row in ours.values())
        met = "within 1 %" if worst <= 0.01 else "**over 1 %**"
        lines += ["", f"The device's rate stays within {worst:.2%} of the undisturbed: {met}."]
    if "arrival_kept" in ours.get("none", {}):
        lines += [
            "",
            "What the host reads of it meanwhile is another matter: it stands and catches up.",
            "",
            *table(
                ["as the host reads them", *ours],
                [
                    ["tokens per second", *(f"{x['arrival_tok_s']:.0f}" for x in ours.values())],
                    [
                        "longest silence, ms",
                        *(f"{x['longest_silence_ms']:.1f}" for x in ours.values()),
                    ],
                    ["longest step on the device, us",
                     *(f"{x['largest_step_us']:.0f}" for x in ours.values())],
                    ["same text", *("yes" if x["same_text"] else "NO" for x in ours.values())],
                ],
            ),
        ]  # fmt: skip
    return lines + failures(r)


PYTHON = ("unpack", "heap", "mask", "marshal", "accept")
"""Stages of the host's loop in which nothing is waited for or launched."""


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
        device = r.get("device_us") or r["graphs_us"]
        parts = ", ".join(f"{k} {v:.0f} us" for k, v in device.items())
        python = sum(host[k] for k in PYTHON)
        lines += [
            "",
            f"On the device's clock: {parts}; idle {r['idle_us']:.0f} us, "
            f"{r['idle_us'] / r['us']:.0%}. Python's own work ({', '.join(PYTHON)}) is "
            f"{python:.0f} us, {python / total:.1%}: a faster heap or a cheaper mask can win no "
            "more than that.",
            *hypotheses(r),
        ]
    if "engine_us" in r:
        stages = ", ".join(f"{k} {v:.0f} us" for k, v in r["engine_us"].items())
        lines += ["", f"The CPU device's own loop at the same size: {stages}."]
    return lines


def hypotheses(r: Result) -> list[str]:
    """One thing changed at a time, with its traces, and which signature is flat."""
    rows, flat, lively = [], [], []
    for name, row in r["switches"].items():
        cells = [name, f"{row['us']:.0f}"]
        for what in ("dram", "tensor"):
            d = row.get(what)
            cells += [f"{d['mean_percent']:.1f} %", f"{d['idle_share']:.0%}"] if d else ["", ""]
        d = row.get("dram")
        rows.append([*cells, f"{d['longest_gap_us']:.0f} us" if d else ""])
        if "flat" in row:
            (flat if row["flat"] else lively).append(name)
    lines = [
        "",
        *table(
            ["one thing changed", "us a step", "DRAM, mean", "its idle samples",
             "tensor pipe, mean", "its idle samples", "longest gap"],
            rows,
        ),
        "",
    ]  # fmt: skip
    if not flat and not lively:
        return [*lines, "Idle samples say that nobody asks for memory, not why."]
    said = f"Flat, both traces idle in at least {r['flat_share']:.0%} of the samples: "
    said += ("; ".join(flat) or "none") + ". Not flat: " + ("; ".join(lively) or "none") + ". "
    if len(flat) > 1:
        said += (
            "**A pair of flat traces fits more than one hypothesis**: kernels launched one by one "
            "starve the device as a slow scheduler does. What tells them apart is the longest gap, "
            "and the host's clock."
        )
    return [*lines, said]
