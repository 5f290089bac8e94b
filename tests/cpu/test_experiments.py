"""Every experiment has a command line, and says what it needs where it cannot run."""

import importlib
import runpy
import sys

import pytest

from experiments import run_all
from experiments.report_pages import PAGES

NAMES = [e.name for e in run_all.EXPERIMENTS]
OF_KERNELS = ["attention_layers", "gpu_decide", "gpu_prompt", "gpu_steps", "gpu_tree"]
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


def play_script(monkeypatch, name, *words):
    """As `python -m` does: some have their command line at the module's end."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as left:
        runpy.run_module(f"experiments.{name}", run_name="__main__")
    return left.value.code


@pytest.mark.parametrize("name", [*OF_KERNELS, "gpu_draft_phases", "gpu_scripted", "cubins"])
def test_help_of_what_times_kernels(name, monkeypatch, capsys):
    assert play_script(monkeypatch, name, "--help") == 0
    assert capsys.readouterr().out.startswith("usage: ")
    assert play_script(monkeypatch, name) == 2
    assert "folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", OF_KERNELS)
def test_what_times_kernels_says_that_it_needs_a_gpu(name, monkeypatch, tmp_path):
    monkeypatch.setattr("experiments.common.default_device", lambda: "cpu")
    said = play_script(monkeypatch, name, str(tmp_path), str(tmp_path / "out.json"))
    assert said.startswith(f"{name} measures an NVIDIA GPU; torch sees none here.")


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
    with pytest.raises(SystemExit, match="nothing was run"):
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
