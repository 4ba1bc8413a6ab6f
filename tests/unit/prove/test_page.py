"""The HTML page of a report."""

from __future__ import annotations

from s3kv.prove.judge import ArmFacts
from s3kv.prove.page import COLUMNS, cells, html
from tests.unit.prove.test_report import proven, report_of


def test_the_page_needs_nothing_from_elsewhere() -> None:
    report = proven()
    page = html(report)
    assert 'class="yes"' in page
    assert report["verdict"] in page
    assert "m&lt;b&gt;" in page
    assert page.count("<svg") == 3
    assert not any(word in page for word in ("http", "<script", "src=", "url("))


def test_what_is_wrong_is_first() -> None:
    page = html(report_of(ArmFacts(error="the <engine> has ended")))
    assert page.index("NOT PROVEN: restart") < page.index("the &lt;engine&gt; has ended")
    assert 'class="no"' in page


def test_a_row_has_a_cell_for_each_column() -> None:
    row = cells("restart", proven()["arms"]["restart"])
    assert dict(zip(COLUMNS, row, strict=True))["served by"] == "engine 10%, connector 80%"
