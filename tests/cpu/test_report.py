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


def test_the_report_and_its_pictures_are_up_to_date():
    assert report.REPORT.read_text(encoding="utf-8") == report.report(), "experiments.report"
    assert report.stale_pictures() == []


def test_a_changed_result_makes_a_picture_stale(tmp_path, monkeypatch):
    """The check is not blind: one digit more in a result, and its picture is named."""
    names = [path.stem for path in report.PICTURES.glob("*.svg")]
    assert names
    for name in names:
        text = (report.RESULTS / f"{name}.json").read_text()
        (tmp_path / f"{name}.json").write_text(text + " ")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert sorted(report.stale_pictures()) == sorted(names)
