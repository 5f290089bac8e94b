"""Every experiment has a command line, and says what it needs where it cannot run."""

import importlib
import sys

import pytest

from experiments import run_all
from experiments.report_pages import PAGES

NAMES = [e.name for e in run_all.EXPERIMENTS]
NEED_GPU = [e for e in run_all.EXPERIMENTS if e.gpu and e.name != "baseline_steps"]


def call(monkeypatch, name, *words):
    module = importlib.import_module(f"experiments.{name}")
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as left:
        module.main()
    return left.value.code


def test_every_experiment_has_a_page():
    assert sorted(NAMES) == sorted(PAGES)


@pytest.mark.parametrize("name", [*NAMES, "run_all", "report"])
def test_help(name, monkeypatch, capsys):
    assert call(monkeypatch, name, "--help") == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize("experiment", NEED_GPU, ids=lambda e: e.name)
def test_without_a_gpu_it_says_what_it_needs(experiment, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.common.default_device", lambda: "cpu")
    said = call(monkeypatch, experiment.name, "--json", str(tmp_path / "out.json"))
    assert said.startswith(f"{experiment.name} measures an NVIDIA GPU; torch sees none here.")
    assert not (tmp_path / "out.json").exists()


def test_run_all_names_what_it_leaves_out(monkeypatch, capsys):
    monkeypatch.setattr(run_all, "default_device", lambda: "cpu")
    monkeypatch.setattr(
        sys, "argv", ["run_all", "--quick", "--no-report", "--only", "dram_trace", "pdl_steps"]
    )
    run_all.main()
    said = capsys.readouterr().out
    assert "dram_trace is not run: it needs an NVIDIA GPU" in said
    assert "pdl_steps is not run: it needs an NVIDIA GPU" in said


def test_a_full_run_times_every_number_of_splits():
    from experiments import verify_attention as v

    cases = v.layer_cases(quick=False)
    assert all(tuple(splits) == (1, 2, 4, 8, 16, 32, 64, 128) for _, _, _, splits in cases)
    assert {rows for _, rows, _, _ in cases} == {1, 16, 64}
    assert {context for _, _, context, _ in cases} == {4096, 16384, 65536}
