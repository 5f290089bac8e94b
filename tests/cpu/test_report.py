"""The README's figures are those of the result files, and its examples run."""

import re
import subprocess
import sys

import pytest

from experiments import report

README = report.README.read_text(encoding="utf-8")


def test_figures_are_up_to_date():
    assert report.rewritten(README) == README, "python -m experiments.report"


def test_every_figure_names_its_revision_and_date():
    for part in (report.cpu_speed(), report.ping(), report.speculation(), report.handoffs()):
        if part:
            assert re.search(r"\d{4}-\d\d-\d\d, revision [0-9a-f]{7,}", part[0]), part[0]


@pytest.mark.parametrize("number", range(README.count("```python\n")))
def test_python_examples_run(number, model_path):
    code = re.findall(r"```python\n(.*?)```", README, re.S)[number]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_files_that_the_readme_names_exist():
    for name in re.findall(r"`((?:tests|experiments|megadecode)/[\w/.*]+)`", README):
        assert list(report.README.parent.glob(name)), name
    for module in re.findall(r"`python -m ([\w.]+)`", README):
        assert (report.README.parent / (module.replace(".", "/") + ".py")).exists(), module
