"""The demo: its first moments, its document and the words that come of it, and what is said of a
bucket of the user's own when it cannot be used, and is left in it."""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from demo import reader
from demo.place import place_to_use
from demo.reader import QUESTIONS, pages_as_text, plain
from demo.words import Words
from lab.engine import ROOT
from lab.s3 import S3Server, moto_process


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


INTERRUPTED_BY_AN_IMPORT = """
import os, sys, time

class Swallowing:
    def find_spec(self, name, path=None, target=None):
        if name != "demo.restart":
            return
        try:
            os.kill(os.getpid(), int(sys.argv[1]))
            time.sleep(1)
        except KeyboardInterrupt:
            pass

sys.meta_path.insert(0, Swallowing())
from demo.__main__ import main
sys.exit(main([]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_cannot_swallow_an_interrupt(number: signal.Signals) -> None:
    command = [sys.executable, "-c", INTERRUPTED_BY_AN_IMPORT, str(int(number))]
    demo = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert demo.returncode == 130, demo.stderr
    assert demo.stderr == "Interrupted. Nothing of it is left running.\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with moto_process() as server:
        assert server.url is not None
        more = {"AWS_ENDPOINT_URL": server.url, "AWS_MAX_ATTEMPTS": "1", "S3KV_BUCKET": "mine"}
        for name, value in (server.env | more).items():
            monkeypatch.setenv(name, value)
        yield server


def refused() -> str:
    with pytest.raises(SystemExit) as end, place_to_use():
        raise AssertionError
    return str(end.value.code)


def test_a_bucket_that_does_not_exist(server: S3Server) -> None:
    told = refused()
    assert told.startswith("S3KV_BUCKET is 'mine': ")
    assert "NoSuchBucket" in told
    assert told.endswith(". `s3kv doctor --bucket mine` says what to do")


def test_an_endpoint_nobody_listens_at(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert url in refused()


def test_an_endpoint_that_is_no_url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    assert "localhost:9000" in refused()


def test_an_empty_name_is_none(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3KV_BUCKET", "")
    with place_to_use() as place:
        assert place.bucket == "demo"


def test_what_was_written_is_removed_and_nothing_else(server: S3Server) -> None:
    server.client().create_bucket(Bucket="mine")
    server.client().put_object(Bucket="mine", Key="other")
    with place_to_use() as place:
        server.client().put_object(Bucket="mine", Key=f"{place.prefix}/one")
    assert list(server.everything("mine")) == ["other"]


def test_an_error_is_not_hidden_by_that_of_cleaning_up(
    server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.client().create_bucket(Bucket="mine")
    with pytest.raises(RuntimeError, match="first"), place_to_use() as place:  # noqa: PT012
        server.client().delete_bucket(Bucket="mine")
        raise RuntimeError("first")
    assert f"s3://mine/{place.prefix}/ is left behind" in capsys.readouterr().err
