"""The document of the demo, and the words that come of it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from demo import reader
from demo.reader import QUESTIONS, pages_as_text, plain
from demo.words import Words


def test_every_question_is_answered_on_a_page() -> None:
    text = pages_as_text()
    assert [f"Question: {question}\nAnswer: " in text for question in QUESTIONS] == [True] * 3


@pytest.mark.parametrize(("flags", "dtype"), [("avx512_bf16", "bfloat16"), ("avx2", "float32")])
def test_bfloat16_is_not_emulated(
    flags: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "CPUINFO", tmp_path / "cpuinfo")
    reader.CPUINFO.write_text(f"flags : sse {flags}\n")
    assert reader.reader(tmp_path, Console(file=io.StringIO())).dtype == dtype


def test_markdown_becomes_questions_and_sentences() -> None:
    assert plain("**Is it?** Yes, as [a page](page.md)\nsays.\n") == (
        "Question: Is it?\nAnswer: Yes, as a page says.\n"
    )
    assert plain("| slot | a part |\n") == 'Question: What does "slot" mean?\nAnswer: a part\n\n'


def test_a_word_is_printed_once_it_is_whole() -> None:
    console = Console(file=io.StringIO(), width=16)
    words = Words(console, indent=4)
    printed = []
    for text, last in (("", False), ("one tw", False), ("one two three", False)):
        words.show(text, last=last)
        printed.append(console.file.getvalue())
    words.show("one two three four", last=True)
    assert printed == ["", "    one", "    one two"]
    assert console.file.getvalue() == "    one two\n    three four\n"
