"""docs/tour.md is what a new user gets to see, commands and all."""

from __future__ import annotations

import pytest

from scripts.tour import TOUR, essence, render


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_tour_is_current() -> None:
    assert essence(TOUR.read_text()) == essence(render()), "run: python -m scripts.tour"


@pytest.mark.parametrize(
    ("written", "now"),
    [
        ("36 objects", "35 objects"),
        ("ok  put", "warning  put"),
        ("0 damaged", "1 damaged"),
        ("within 60 s", "within 61 s"),
        ("$0.005 for 1,000 requests", "free of charge"),
    ],
)
def test_what_matters_is_compared(written: str, now: str) -> None:
    page = TOUR.read_text()
    assert written in page
    assert essence(page.replace(written, now)) != essence(page)
