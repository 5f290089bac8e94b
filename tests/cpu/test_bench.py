"""`megadecode bench` times what it says it times."""

import dataclasses
import json
import re

import pytest
import tiny_drafter as td
from command_line import command
from speculative import ids

import megadecode.bench as module
from cute_kernels.plan import PHASES
from megadecode import Engine, ParameterError, Request
from megadecode.commands import bench as bench_command
from megadecode.trace import STAGES, PhaseFigures, bytes_per_step, stage_of, stage_us

OPTIONS = dict(ctx=512, workers=2, draft=td.drafter(), budget=7)
PROMPTS = [ids(20), ids(57)]


def measure(**changes):
    values = {"prompts": PROMPTS, "tokens": 24, "rounds": 2} | OPTIONS | changes
    return module.bench(td.target(), **values)


def test_both_sides_take_turns_and_every_step_is_accounted_for():
    said = []
    report = measure(say=said.append)
    assert said == [
        "loading",
        "warming up, plain", "warming up, speculation",
        "round 1 of 2, speculation", "round 1 of 2, plain",
        "round 2 of 2, plain", "round 2 of 2, speculation",
    ]  # fmt: skip
    for side in ("plain", "speculation"):
        assert len(report[side]["rounds"]) == 2
        for one in report[side]["rounds"]:
            assert one["tokens"] == 48
            assert sum(one["stages"].values()) == pytest.approx(one["step_us"])
            assert -0.05 < one["stages"]["between steps"] / one["step_us"] < 0.9
            assert list(one["stages"]) == [*STAGES, "between steps"]
            assert one["tok_s"] == pytest.approx(one["tau"] / one["step_us"] * 1e6)
            assert one["read_gb_s"] > 0
    plain, speculating = report["plain"], report["speculation"]
    assert plain["tau"] == 1
    assert plain["stages"]["draft"] == 0 < speculating["stages"]["draft"]
    assert speculating["tau"] >= 1
    c = td.TARGET
    layer = c.hidden * (2 * c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.hidden * c.ffn
    weights = 4 * (c.layers * layer + c.vocab * c.hidden)
    assert 1 < plain["read_bytes"] / weights < 1.2, "all weights once, and some keys and values"
    with Engine(td.target(), ctx=64, workers=1, draft="off") as engine:
        assert module.weight_bytes(engine) == weights
    assert speculating["read_bytes"] > plain["read_bytes"]
    assert report["speedups"] == [
        a["tok_s"] / b["tok_s"] for a, b in zip(speculating["rounds"], plain["rounds"])
    ]
    json.dumps(report)


def test_only_one_engine_runs_at_a_time(monkeypatch):
    engines, init, submit = [], Engine.__init__, Engine.submit

    def noted(self, *args, **options):
        init(self, *args, **options)
        engines.append(self)

    def watched(self, *args, **options):
        others = [engine for engine in engines if engine is not self]
        assert {engine.stats().state for engine in others} <= {"parked"}
        return submit(self, *args, **options)

    monkeypatch.setattr(Engine, "__init__", noted)
    monkeypatch.setattr(Engine, "submit", watched)
    measure(rounds=1, tokens=4)
    assert len(engines) == 2
    assert all(engine.is_lost for engine in engines), "both are closed"


def test_sides_that_differ_void_the_figures(monkeypatch):
    round_, calls = module._round, 0

    def lying(*args):
        nonlocal calls
        calls += 1
        results, one = round_(*args)
        if calls == 3:
            results[0].token_ids[-1] += 1
        return results, one

    monkeypatch.setattr(module, "_round", lying)
    with pytest.raises(module.Void, match="round 1, speculation, gave other tokens"):
        measure(tokens=4)


def test_a_trace_that_misses_a_step_or_a_request_that_fails_voids_them_too(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, "decode_steps_of", lambda figures: 5)
        with pytest.raises(module.Void, match="the trace holds 5 decode steps, the requests had 6"):
            measure(draft="off", tokens=4)
    result = Request.result
    monkeypatch.setattr(
        Request, "result", lambda self: dataclasses.replace(result(self), error="a NaN")
    )
    with pytest.raises(module.Void, match="a request ended with an error: a NaN"):
        measure(draft="off", tokens=4)


def test_without_a_drafter_only_plain_decoding_is_measured():
    report = measure(draft="off", rounds=1, tokens=4)
    assert "speculation" not in report and "speedup" not in report
    assert len(report["plain"]["rounds"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 1}, "tokens is 1; it must be between 2 and 1048576"),
        ({"rounds": 0}, "rounds is 0; it must be between 1 and 1000"),
        ({"prompts": []}, "prompts is empty; give at least one"),
    ],
)
def test_what_cannot_be_measured(options, message):
    with pytest.raises(ParameterError, match=f"^{message}$"):
        measure(**options)


def test_every_phase_belongs_to_a_stage():
    stages = {phase.name: stage_of(phase.name) for phase in PHASES}
    assert set(stages.values()) == set(STAGES)
    assert stages["tree"] == stages["rows"] == "tree"
    assert stages["draft_head"] == stages["draft_rank"] == "draft"
    assert stages["head"] == stages["attend"] == stages["tap"] == "verify"


def test_figures_add_up_over_runs():
    def figure(phase, runs, us, size):
        return PhaseFigures("decode", phase, runs, us, 0, 0, 0, size)

    figures = [figure("qkv", 30, 2.0, 100), figure("decide", 10, 5.0, 7), figure("tree", 5, 4.0, 0)]
    assert stage_us(figures) == {"draft": 0, "tree": 2, "verify": 6, "decide": 5, "compact": 0}
    assert bytes_per_step(figures) == 307
    assert stage_us([]) == {} and bytes_per_step([]) == 0


def test_the_command_prints_and_writes_json(model_path, capsys):
    words = ("bench", "--ctx", "512", "--tokens", "4", "--rounds", "1", "--prompt", "hello")
    done = command(*words, "--draft", "off", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["plain"]["rounds"][0]["tokens"] == 4
    bench_command._print(report)
    said = capsys.readouterr().out
    assert re.search(r"tokens a step \(tau\) +1\.00\n", said)
    assert "no drafter: only plain decoding was measured" in said
    both = report | {"speculation": report["plain"], "speedup": 1.5, "speedups": [1.4, 1.6]}
    bench_command._print(both)
    assert "speculation / plain: 1.50 (rounds: 1.40 1.60)" in capsys.readouterr().out
