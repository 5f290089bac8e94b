"""The README's figures are those of the result files."""

import re

from experiments import report

README = report.README.read_text(encoding="utf-8")


def test_figures_are_up_to_date():
    assert report.rewritten(README) == README, "python -m experiments.report"


def test_every_figure_names_its_revision_and_date():
    sections = (report.cpu_speed, report.ping, report.speculation, report.gpu_steps)
    for part in (section() for section in (*sections, report.handoffs)):
        if part:
            assert re.search(r"\d{4}-\d\d-\d\d, revision [0-9a-f]{7,}", part[0]), part[0]
