"""The README's figures are those of the result files."""

import re

from experiments import report

README = report.README.read_text(encoding="utf-8")


def test_figures_are_up_to_date():
    assert report.rewritten(README) == README, "python -m experiments.report"
    assert report.FIGURES.read_text(encoding="utf-8") == report.figures(), "experiments.report"


def test_the_readme_shows_little_and_says_where_we_lose():
    shown = README[README.index(report.BEGIN) : README.index(report.END)]
    assert len(shown.splitlines()) < 30 and "**Where we lose**" in shown


def test_every_figure_names_its_revision_and_date():
    stamp = r"\d{4}-\d\d-\d\d, revision [0-9a-f]{7,}"
    for section in report.SECTIONS:
        part = section()
        if part and section is not report.drafter:  # its lines name theirs, one by one
            assert re.search(stamp, part[0]), part[0]
    for line in report.headline():
        if line.startswith(("- ", "**A speculative step")):
            assert re.search(stamp, line) and "python -m experiments." in line, line


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
