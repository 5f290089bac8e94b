"""Figures state a spread, and two runs are compared by it."""

import json
import os
import sys
import time

import pytest

from experiments import agreement, run_all
from experiments.common import FLOORS, MANY, figure


def test_a_spread_is_the_rounds_range_and_at_least_the_floor():
    found = figure([100.0, 110.0, 104.0])
    assert found == dict(value=104.0, least=100.0, most=110.0, spread=10.0, kind="device")
    assert figure([100.0, 100.0])["spread"] == pytest.approx(100 * FLOORS["device"])
    assert figure([100.0, 100.0], "host")["spread"] == pytest.approx(100 * FLOORS["host"])
    assert figure([0.5, 0.5], "share")["spread"] == pytest.approx(0.02)


def test_many_samples_are_five_rounds_so_that_one_of_them_says_little():
    samples = [1.0] * (5 * MANY)
    samples[7] = 1000.0
    found = figure(samples)
    assert (found["least"], found["most"], found["spread"]) == (1.0, 1.0, FLOORS["device"])


def folder_of(path, **experiments):
    path.mkdir()
    for name, figures in experiments.items():
        result = {"device": "cpu", "revision": "r", "date": "d"}
        result["figures"] = {label: figure(samples) for label, samples in figures.items()}
        (path / f"{name}.json").write_text(json.dumps(result))
    (path / "run_full.json").write_text("{}")
    return path


def test_two_runs_agree_where_every_figure_lies_within_its_spread(tmp_path, monkeypatch, capsys):
    a = folder_of(tmp_path / "a", steps={"x": [100, 104], "y": [10, 10], "z": [1]}, alone={})
    b = folder_of(tmp_path / "b", steps={"x": [105, 106], "y": [11.5, 11.5]})
    out = tmp_path / "agreement.json"
    monkeypatch.setattr(sys, "argv", ["agreement", str(a), str(b), "--json", str(out)])
    with pytest.raises(SystemExit) as left:
        agreement.main()
    assert left.value.code == 1
    said = capsys.readouterr().out
    assert "1 of 2 within the stated spread" in said and "y: 10 and 11.5, stated 0.86" in said
    found = json.loads(out.read_text())
    assert found["experiments"]["steps"]["outside"] == ["y"]
    assert found["experiments"]["steps"]["outside of today's floors"] == ["y"]
    assert found["experiments"]["steps"]["in one only"] == ["z"]
    assert found["in one folder only"] == ["alone"]

    same = folder_of(tmp_path / "c", steps={"x": [105], "y": [10.2], "z": [1]})
    monkeypatch.setattr(sys, "argv", ["agreement", str(a), str(same), "--json", str(out)])
    agreement.main()
    assert "3 of 3 within" in capsys.readouterr().out


def test_folders_without_a_common_experiment_say_so(tmp_path):
    a, b = (folder_of(tmp_path / n, **{n: {"x": [1]}}) for n in "ab")
    with pytest.raises(SystemExit, match="no experiment with figures in common"):
        agreement.agreement(a, b)


def gone(pid):
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_an_experiment_that_takes_too_long_is_stopped_with_what_it_started(tmp_path):
    started = tmp_path / "started"
    child = f"import os, pathlib, time; pathlib.Path({str(started)!r}).write_text(str(os.getpid()))"
    child += "; time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run_all.run([sys.executable, "-c", parent], 3.0) is None
    assert gone(int(started.read_text()))
    assert run_all.run([sys.executable, "-c", "raise SystemExit(3)"], 20.0) == 3


def test_a_run_of_some_keeps_the_times_of_the_others(tmp_path, monkeypatch):
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["run_all", "--quick", "--no-report", *words])
        run_all.main()
        return json.loads((tmp_path / "run_quick.json").read_text())

    monkeypatch.setattr(run_all, "default_device", lambda: "cuda")
    monkeypatch.setattr(run_all, "command", lambda e, args: [sys.executable, "-c", "0"])
    words = ["--results", str(tmp_path), "--only"]
    first = call(*words, "marshaling", "compaction")
    assert set(first["seconds"]) == {"marshaling", "compaction"} and not first["failed"]
    second = call(*words, "host_stall")
    assert set(second["seconds"]) == {"marshaling", "compaction", "host_stall"}
    assert second["total_s"] == pytest.approx(sum(second["seconds"].values()))
    assert set(call("--results", str(tmp_path))["seconds"]) >= {"tree_build", "dram_trace"}
    monkeypatch.setattr(run_all, "command", lambda e, args: [sys.executable, "-c", "exit(1)"])
    with pytest.raises(SystemExit, match="marshaling: exit 1"):
        call(*words, "marshaling")
    assert json.loads((tmp_path / "run_quick.json").read_text())["failed"]["marshaling"]


def test_results_without_a_kind_are_judged_by_what_they_stated():
    tight, wide = (dict(value=100.0, spread=spread) for spread in (3.0, 10.0))
    assert agreement.kind_of(tight, tight) == "device" == agreement.kind_of(tight, wide)
    assert agreement.kind_of(wide, wide) == "host"
    a, b = ({"figures": {"x": dict(value=v, spread=v / 10)}} for v in (100.0, 130.0))
    found = agreement.compared(a, b)
    assert found["outside"] == ["x"] and found["outside of today's floors"] == []
