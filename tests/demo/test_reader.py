"""The demo: its first moments, its document and the words that come of it, and what is said of a
bucket of the user's own when it cannot be used, and is left in it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from demo import __main__, place, reader
from demo.place import place_to_use
from demo.reader import QUESTIONS, pages_as_text, plain
from demo.words import Words
from lab.engine import ROOT
from lab.s3 import S3Server, moto_process
from lab.service import answers, free_ports


def test_every_question_is_answered_on_a_page() -> None:
    text = pages_as_text()
    assert [f"Question: {question}\nAnswer: " in text for question in QUESTIONS] == [True] * 3


@pytest.mark.long
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


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(__main__, "find_spec", lambda name: None)
    assert __main__.main([]) == 2
    assert "Run `make clean`, then `make demo PYTHON=python3.11`" in capsys.readouterr().err


@pytest.mark.parametrize(("listed", "kept"), [("", ""), ("a.example", "a.example,"), ("*", None)])
def test_no_proxy_stands_before_a_server_of_our_own(
    monkeypatch: pytest.MonkeyPatch, listed: str, kept: str | None
) -> None:
    monkeypatch.setattr(place, "find_weed", lambda: None)
    env = {n: v for n, v in os.environ.items() if not n.lower().endswith("_proxy")}
    with moto_process() as proxy:  # it answers whatever it is asked
        monkeypatch.setattr(os, "environ", env | {"http_proxy": proxy.url, "NO_PROXY": listed})
        assert not answers(f"http://127.0.0.1:{free_ports(1)[0]}/")
        with place.own_server() as (server, _):
            expected = "*" if kept is None else f"{kept}127.0.0.1,localhost"
            assert os.environ["NO_PROXY"] == os.environ.get("no_proxy", "*") == expected
            server.client().create_bucket(Bucket="demo")
            assert not proxy.client().list_buckets()["Buckets"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with moto_process() as server:
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


def test_endpoints_that_are_refused(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_listens, no_url = f"http://127.0.0.1:{free_ports(1)[0]}", "localhost:9000"
    for endpoint in (nobody_listens, no_url):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert endpoint in refused()


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
