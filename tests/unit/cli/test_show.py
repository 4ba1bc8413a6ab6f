"""What a terminal gets: text as text, quantities for people."""

from __future__ import annotations

import re
from functools import partial

import pytest
from rich.text import Text

from s3kv.cli import show


def test_text_is_never_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show.print_table(["name", *show.numbers("bytes")], [("[red]x", "7"), (Text("[b]y"), "1,000")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    cells = [["name", "bytes"], ["[red]x", "7"], ["[b]y", "1,000"]]
    assert [line.split() for line in lines] == cells
    assert len({len(line) for line in lines}) == 1, "numbers end in one column"
    show.print_grid([("key", "[red]value"), (Text("other"), "value")])
    assert "[red]value" in capsys.readouterr().out


def test_a_long_word_can_be_copied(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    key = "0123456789abcdef" * 5
    for print_rows in (show.print_grid, partial(show.print_table, ["", ""])):
        print_rows([("key", key)])
        assert "".join(capsys.readouterr().out.replace("key", "", 1).split()) == key


def test_bars_are_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with show.bars() as on_progress:
        on_progress("counting", 1, None)
        on_progress("counting", 2, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (32 * 2**20, "32.0 MiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_sizes(nbytes: int, told: str) -> None:
    assert show.size(nbytes) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-5.0, "0 min"), (90.0, "2 min"), (show.HOUR_S, "1 h"), (2 * show.DAY_S, "2 d")],
)
def test_ages(seconds: float, told: str) -> None:
    assert show.age(seconds) == told


def test_bars_show_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    now_s = 0.0
    with show.bars(lambda: now_s) as on_progress:
        for second in range(11):
            now_s = float(second)
            on_progress("deleting", 100 * second, 4000)
    told = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"0:00:30 +1000/4000", told), told
