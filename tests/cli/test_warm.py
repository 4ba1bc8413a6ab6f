"""`s3kv warm`, against a server that answers as vLLM's does."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from s3kv.cli.app import cli
from tests.rgw import free_ports


class Endpoint(http.server.ThreadingHTTPServer):
    """Counts tokens as words. cached: per prompt, None to say nothing of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.names = ["m"]
        self.cached: int | None = None
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str | None] = set()
        self.lock = threading.Lock()
        self.running = self.most_running = 0


class Handler(http.server.BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": name} for name in self.server.names]})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append((self.path, body))
            server.keys.add(self.headers["Authorization"])
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        time.sleep(0.02)
        with server.lock:
            server.running -= 1
        if "too long" in str(body):
            self.answer(400, {"error": {"message": 'the prompt is "too" long', "code": 400}})
            return
        words = body.get("prompt") or body["messages"][0]["content"]
        tokens = len(words) if isinstance(words, list) else len(words.split())
        details = None if server.cached is None else {"cached_tokens": server.cached}
        self.answer(200, {"usage": {"prompt_tokens": tokens, "prompt_tokens_details": details}})

    def answer(self, status: int, document: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def warm(file: Path, url: str, *arguments: str) -> Result:
    command = ["warm", str(file), "--url", url, *arguments]
    return CliRunner().invoke(cli, command, catch_exceptions=False)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("one two three\n\n{not json\n" + "a b\n" * 20)
    return file


def test_a_text_file(endpoint: Endpoint, text: Path) -> None:
    result = warm(text, endpoint.url, "--at-once", "3", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "model": "m",
        "sent": 22,
        "prompt_tokens": 3 + 2 + 20 * 2,
        "cached_tokens": None,
        "failed": [],
    }
    assert {path for path, _ in endpoint.asked} == {"/v1/completions"}
    assert all(body["max_tokens"] == 1 and body["model"] == "m" for _, body in endpoint.asked)
    assert 1 < endpoint.most_running <= 3


def test_json_lines(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.cached = 2
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hello there"}]
    lines = ["a b c", [5, 6, 7, 8], {"prompt": "x y", "lora": 1}, {"messages": messages}]
    file.write_text("\n".join(map(json.dumps, lines)))
    result = warm(file, endpoint.url, "--at-once", "1", "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert "4 prompts, 11 tokens, through m" in result.stdout
    assert "8 were there already, 3 were computed" in result.stdout
    paths = [path for path, _ in endpoint.asked]
    assert paths == [*["/v1/completions"] * 3, "/v1/chat/completions"]
    assert endpoint.asked[2][1]["lora"] == 1
    assert endpoint.keys == {"Bearer secret"}


def test_what_fails_is_named_and_not_tried_again(endpoint: Endpoint, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("fine\ntoo long\nfine\n")
    result = warm(file, endpoint.url)
    assert result.exit_code == 1
    assert "2 prompts, 2 tokens" in result.stdout
    assert "--enable-prompt-tokens-details" in result.stdout
    assert "line 2: " in result.stderr
    assert 'answers 400: the prompt is "too" long' in result.stderr
    assert len(endpoint.asked) == 3


def test_one_of_several_models(endpoint: Endpoint, text: Path) -> None:
    endpoint.names = ["m", "lora"]
    assert warm(text, endpoint.url, "--model", "lora").exit_code == 0
    assert {body["model"] for _, body in endpoint.asked} == {"lora"}
    for arguments, said in (([], "--model is missing"), (["--model", "n"], "'n' is not served")):
        result = warm(text, endpoint.url, *arguments)
        assert result.exit_code == 2
        assert said in result.stderr
        assert "There are: m, lora" in result.stderr


def test_nobody_there(text: Path) -> None:
    result = warm(text, f"http://127.0.0.1:{free_ports(1)[0]}")
    assert result.exit_code == 3
    assert "nobody answers at http://127.0.0.1" in result.stderr


def test_somebody_else_there(text: Path) -> None:
    class Page(Handler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>welcome</html>")

    with Endpoint() as server:
        server.RequestHandlerClass = Page
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        result = warm(text, server.url)
        server.shutdown()
        thread.join()
    assert result.exit_code == 3
    assert "is it a vLLM server?" in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("prompts.txt", "\n\n", "has no prompts"),
        ("prompts.jsonl", '"fine"\n{broken', "line 2 is not JSON"),
        ("prompts.jsonl", '{"question": "?"}', "line 1 is no prompt"),
        ("prompts.jsonl", "[]", "line 1 is no prompt"),
        ("prompts.jsonl", "[1, 2.5]", "line 1 is no prompt"),
    ],
)
def test_files_that_cannot_be_used(
    endpoint: Endpoint, tmp_path: Path, name: str, content: str, said: str
) -> None:
    (tmp_path / name).write_text(content)
    result = warm(tmp_path / name, endpoint.url)
    assert result.exit_code == 2
    assert said in result.stderr
    assert endpoint.asked == []
