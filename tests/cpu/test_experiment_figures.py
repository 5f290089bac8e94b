"""What the experiments compute from their measurements, on measurements made up here."""

import gzip
import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from experiments import host_stall, phase_slots, report_host, report_rivals
from experiments.dram_trace import summary
from experiments.host_stall import WARM_STEPS, rates
from experiments.pm_sampling import DRAM, Trace
from experiments.step_breakdown import BINS, binned


def test_the_device_s_rate_does_not_depend_on_when_the_host_reads():
    """The same device stamps, read on time, late, and in two heaps."""
    counts = [1 + i % 4 for i in range(400)]
    stamps = [1_000_000 + 500_000 * i for i in range(400)]
    on_time = [stamp + 3_000 for stamp in stamps]
    late = [max(stamp, 150_000_000) + 3_000 for stamp in stamps]
    calm, frozen = rates(stamps, on_time, counts), rates(stamps, late, counts)
    steps = 400 - 1 - WARM_STEPS
    assert calm["tokens"] == frozen["tokens"] == sum(counts[WARM_STEPS + 1 :])
    assert calm["seconds"] == frozen["seconds"] == pytest.approx(steps * 500e-6)
    assert calm["arrival_tok_s"] == pytest.approx(calm["tokens"] / calm["seconds"])
    assert frozen["arrival_tok_s"] > 1.2 * calm["arrival_tok_s"]
    assert calm["longest_silence_ms"] == pytest.approx(0.5)


def test_a_slow_device_shows_in_its_own_rate():
    stamps = [500_000 * i for i in range(200)]
    slow = [stamp + 40_000_000 * (i > 100) for i, stamp in enumerate(stamps)]
    fast, hung = (rates(s, s, [4] * 200) for s in (stamps, slow))
    assert hung["seconds"] == pytest.approx(fast["seconds"] + 0.04)
    assert hung["largest_step_us"] == pytest.approx(40_500)


CHILD = """
import json
for form in ("first", "second"):
    for turn in range(2):
        print("ready " + form, flush=True)
        input()
        print("begun", flush=True)
        if (form, turn) == ("second", 1):
            raise SystemExit(1)
        print(json.dumps(dict(tokens=100 - 60 * turn, seconds=1.0)), flush=True)
"""


def test_a_contender_that_dies_costs_no_other_s_figures(monkeypatch):
    popen = subprocess.Popen
    monkeypatch.setattr(host_stall, "DISTURBANCES", ("none", "held"))
    monkeypatch.setattr(
        host_stall.subprocess, "Popen", lambda words, **how: popen([sys.executable, "-c", CHILD],
                                                                   **how)
    )  # fmt: skip
    kept, failed = {}, {}
    host_stall.run(["first", "second"], [], 1, kept.__setitem__, failed)
    assert list(kept) == ["first"] and kept["first"]["held"]["kept"] == pytest.approx(0.4)
    assert "second" in failed and "first" not in failed


def times_of(ctas=22, layers=2):
    """Stamps of a step in which phase follows phase; CTA 11 has no part in the second one."""
    phases = 4 * layers + 1
    begin = 10_000 + 5_000 * np.arange(phases)
    times = begin[None, :, None] + np.array([0, 1_000, 3_000, 4_000])
    times = np.repeat(times, ctas, 0) + np.arange(ctas)[:, None, None]
    times[11, 1] = 0
    return times


def test_phase_slots_nest_and_follow_each_other(tmp_path):
    events = list(phase_slots.slots(times_of(), 10_000))
    phase_slots.write(tmp_path / "a.perfetto.json.gz", "a step", events)
    found = json.loads(gzip.decompress((tmp_path / "a.perfetto.json.gz").read_bytes()))
    assert found["traceEvents"][0]["args"]["name"] == "a step"
    slices = [e for e in found["traceEvents"] if e["ph"] == "X"]
    for cta, phases, attentions in ((0, 9, 2), (11, 8, 1)):
        mine = [e for e in slices if e["tid"] == cta]
        outer = [e for e in mine if e["name"] not in phase_slots.PARTS]
        assert len(outer) == phases + attentions and len(mine) == 4 * phases + attentions
        for e in outer:
            assert e["dur"] == pytest.approx(1.0 if e["name"].startswith("attention") else 4.0)
        for before, after in pairwise(outer):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-9
        for e in mine:
            assert any(
                o["ts"] <= e["ts"] and e["ts"] + e["dur"] <= o["ts"] + o["dur"] + 1e-9
                for o in outer
            )
    names = [e["name"] for e in slices if e["tid"] == 0 and e["name"] not in phase_slots.PARTS]
    assert names[:3] == ["qkv 0", "attention 0", "o 0"] and names[-2:] == ["down 1", "lm"]
    kinds = summary(times_of())
    assert kinds["attention"] == {"between qkv and o": 1.0}
    assert kinds["gu"] == dict(zip(phase_slots.PARTS, (1.0, 2.0, 1.0)))


def test_counters_keep_every_sample():
    made = list(phase_slots.counters("DRAM", np.array([5_000.0, 10_000.0]), np.array([3.0, 90.0]),
                                     5_000))  # fmt: skip
    assert [(e["ts"], e["args"]["%"]) for e in made] == [(0.0, 3.0), (5.0, 90.0)]


def trace_of(values):
    at = 5_000.0 * np.arange(len(values))
    return Trace([DRAM], at, at + 5_000, np.array(values, float)[:, None])


def test_a_trace_in_stretches_keeps_its_mean_and_its_length():
    values = [0.0] * (3 * BINS) + [80.0] * (3 * BINS)
    made = binned(trace_of(values), DRAM)
    assert len(made["percent"]) == BINS and np.mean(made["percent"]) == pytest.approx(40.0)
    assert made["us"][1] == 30.0
    assert binned(trace_of([7.0] * 5), DRAM)["percent"] == [7.0] * 5


def test_idle_samples_and_gaps():
    found = trace_of([50.0] * 4 + [0.5] * 3 + [50.0] + [0.0] * 2).figures(DRAM)
    assert found["idle_share"] == pytest.approx(0.5)
    assert found["longest_gap_us"] == pytest.approx(15.0)


def case(form, context, us, tok_s, acceptance="drafter", prompt=0.1):
    whole = prompt + 256 / tok_s
    return dict(form=form, context=context, us=us, tok_s=tok_s, acceptance=acceptance, tau=3.0,
                prefill_s=prompt, with_prefill_tok_s=256 / whole)  # fmt: skip


def test_the_sweep_s_page_labels_what_is_scripted_and_shows_the_common_term():
    cases = [
        case("megakernel", 1024, 500.0, 6000.0, prompt=0.01),
        case("graph_host_tree", 1024, 3000.0, 1000.0, prompt=0.01),
        case("megakernel", 64000, 1000.0, 4000.0, "scripted", 10.0),
        case("graph_host_tree", 64000, 30000.0, 133.0, "scripted", 10.0),
    ]
    r = dict(model="m", rows=16, committed=4, new_tokens=256, cases=cases, failed={"x": "why"})
    page = "\n".join(report_rivals.context_sweep(r))
    assert "|  | 1024 | 64000, scripted |" in page
    assert "6.0 / 5.1 | 30.0 / 1.2" in page and "Failed: x: why." in page


def test_the_page_on_whole_steps_says_where_the_graph_is_ahead():
    def whole(ratio):
        kernel = dict(us=500.0, tau=4.1, split_us={"draft": 50.0})
        graph = dict(us=500.0 * ratio, tau=4.0)
        return [{"context": 1024, "kernel": kernel, "graph_pdl": graph,
                 "graph_pdl / kernel": ratio}]  # fmt: skip

    verify = dict(context=1024, rows=16, logits_equal=True, us={"kernel": 1.0, "graph_pdl": 1.0})
    r = {"rows": 16, "models": {"smollm2-135m": [verify | {"graph_pdl / kernel": 1.0}]}}
    said = {}
    for ratio in (0.9, 1.1, 1.3):
        page = report_rivals.pdl_steps(r | {"whole": {"smollm2-135m": whole(ratio)}})
        said[ratio] = next(line for line in page if "at least" in line)
    assert "**the graph is ahead**" in said[0.9]
    assert "**the goal of 1.25x is missed**" in said[1.1]
    assert "the goal of 1.25x is reached" in said[1.3]


def test_the_page_on_hypotheses_names_the_flat_ones():
    idle = dict(mean_percent=2.0, idle_share=0.9, longest_gap_us=900.0)
    busy = dict(mean_percent=20.0, idle_share=0.4, longest_gap_us=300.0)
    switches = {
        "as it is": dict(us=1.0, dram=busy, tensor=busy, flat=False),
        "eager": dict(us=9.0, dram=idle, tensor=idle, flat=True),
        "scheduler": dict(us=9.0, dram=idle, tensor=idle, flat=True),
    }
    r = dict(switches=switches, flat_share=0.8)
    page = report_host.hypotheses(r)
    assert "Flat, both traces idle in at least 80% of the samples: eager; scheduler. " in page[-1]
    assert "Not flat: as it is." in page[-1] and "more than one hypothesis" in page[-1]


def test_a_stalled_device_is_called_so():
    def rows(kept):
        arrival = dict(arrival_tok_s=1.0, arrival_kept=1.0, longest_silence_ms=1.0,
                       largest_step_us=1.0, same_text=True)  # fmt: skip
        return {"none": dict(tok_s=100.0, kept=1.0, **arrival),
                "frozen": dict(tok_s=100.0 * kept, kept=kept, **arrival)}  # fmt: skip

    for kept, words in ((0.995, "within 1 %"), (0.98, "**over 1 %**")):
        r = dict(model="m", rows=16, contenders={"megakernel": rows(kept)}, failed={})
        assert words in "\n".join(report_host.host_stall(r))
