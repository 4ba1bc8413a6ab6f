"""The checks of docstrings and of phrases find what they should, and the package passes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_docstrings, check_english
from scripts.check_docstrings import faults, report

GOOD = '"""Slot table: the holder of each slot."""\n'
CLASS = '''class Table:
    """Which slots there are."""
    def __init__(self):
        """For one thread."""
    def is_full(self):
        """Whether no slot is free."""
    def _evict(self):
        """What goes first."""
async def main():
    """As `Table`."""
def plain(): ...
'''


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Under which hashes a request's chunks are kept.", "Under"),
        ("By which of two ways the bytes go.", "By"),
        ("What, of all things, is kept.", "What"),
        ("Whether it pays to wait.", "Whether"),
        ("\n    Who holds which slot.", "Who"),
    ],
)
def test_a_module_that_starts_with_a_clause_is_found(text: str, word: str) -> None:
    assert list(faults(f'"""{text}"""')) == [(1, f"the module's docstring starts with {word!r}")]


def test_a_module_without_a_docstring_is_found() -> None:
    assert list(faults("x = 1\n")) == [(1, "the module has no docstring")]


@pytest.mark.parametrize(
    "text", ["Whatever is left.", "`on_error`: a setting.", "Asks the bucket."]
)
def test_only_whole_words_count(text: str) -> None:
    assert list(faults(f'"""{text}"""')) == []


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("One line\nand another.", []),
        ("One line\nand another.\n", ["the quotes close below the last line"]),
        ("One line\n" + 98 * "x" + "\n", []),
        ("One paragraph.\n\nAnother.\n", []),
        ("One paragraph.\n\nAnother.", ["the quotes close on the last line"]),
    ],
)
def test_the_quotes_close_where_they_belong(text: str, messages: list[str]) -> None:
    assert [message for _, message in faults(f'"""{text}"""')] == messages


def test_classes_and_public_functions_are_checked() -> None:
    assert sorted(faults(GOOD + CLASS)) == [
        (2, "the docstring of Table starts with 'Which'"),
        (4, "the docstring of __init__ starts with 'For'"),
        (10, "the docstring of main starts with 'As'"),
    ]


def test_a_fault_in_the_package_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    function = '\n\ndef shut():\n    """After the last call."""\n'
    (tmp_path / "good.py").write_text(GOOD)
    monkeypatch.setattr(check_docstrings, "PACKAGE", tmp_path)
    assert report(faults) == 0
    assert capsys.readouterr().out == ""
    (tmp_path / "bad.py").write_text(GOOD + function)
    assert report(faults) == 1
    told = f"{tmp_path / 'bad.py'}:4: the docstring of shut starts with 'After'\n"
    assert capsys.readouterr().out == told


@pytest.mark.parametrize(
    "line",
    [
        'log.warning("%s is not what its key says", key)',
        'raise ValueError(f"{name} is no number")',
        'Metric("Chunks asked for in the bucket.")',
        'option("--x", help="To say what it saves")',
        'class Config:\n    x: int = 1\n    """Bytes on their way to the bucket."""',
        '@click.command()\ndef run():\n    """Look at the bucket."""',
    ],
)
def test_a_phrase_is_found(line: str) -> None:
    assert list(check_english.faults(line))


@pytest.mark.parametrize(
    "line",
    [
        'log.warning("%s failed verification", key)',
        'raise ValueError("there is no such file")',
        'assert x, "nobody reports it"',
        'def run():\n    """Look at what is told."""',
        'told = "said"',
    ],
)
def test_other_texts_pass(line: str) -> None:
    assert not list(check_english.faults(line))


def test_the_package_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(faults) == 0, capsys.readouterr().out
