"""Prompts from a file, sent through a running server so that it computes and saves them."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from s3kv.cli.server import Server, ServerError
from s3kv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: where in the file it stands, what it asks, and of which path of the API."""

    line: int
    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Warmed:
    """What came of it. cached_tokens: of the prompts, those that were not computed; None when the
    server does not tell. failed: line and reason."""

    sent: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    failed: list[tuple[int, str]] = field(default_factory=list)


def read_prompts(file: Path) -> list[Prompt]:
    """One prompt for each line that is not blank. Raises `ConfigError`, which names the line.

    In a file *.jsonl a line is a text, a list of token ids, or the body of a request: an object
    with "prompt" or "messages". In any other file it is a text.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{str(file)!r} has no prompts: put one on each line")
    if file.suffix == ".jsonl":
        return [_of_json(number, line) for number, line in numbered]
    return [Prompt(number, "/v1/completions", {"prompt": line}) for number, line in numbered]


def choose_model(server: Server, wanted: str | None) -> str:
    """The name to ask for. Raises `ServerError`, or `ConfigError` when it is not among those the
    server has, or one has to be chosen."""
    names = server.models()
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted in names:
        return str(wanted)
    known = ", ".join(names) or "none"
    problem = "--model is missing" if wanted is None else f"--model {wanted!r} is not served"
    raise ConfigError(f"{problem} at {server.url}. There are: {known}")


def send(
    server: Server,
    model: str,
    prompts: Sequence[Prompt],
    *,
    at_once: int,
    on_answer: Callable[[int], None],
) -> Warmed:
    """Ask each prompt once, for one token, `at_once` at a time. Blocks.

    on_answer: told after each how many there are. A prompt that fails is noted and not tried again.
    """
    waiting: queue.SimpleQueue[Prompt] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)
    answers: queue.SimpleQueue[tuple[int, dict[str, Any] | str]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                prompt = waiting.get_nowait()
            except queue.Empty:
                return
            answers.put((prompt.line, _ask(server, model, prompt)))

    for _ in range(min(at_once, len(prompts))):
        # Daemons, so that Ctrl-C need not wait for what the server computes.
        threading.Thread(target=work, daemon=True).start()
    warmed = Warmed()
    for done in range(1, len(prompts) + 1):
        _count(warmed, *answers.get())
        on_answer(done)
    warmed.failed.sort()
    return warmed


def _ask(server: Server, model: str, prompt: Prompt) -> dict[str, Any] | str:
    """The usage that was answered, or why there is none."""
    body = {**prompt.body, "model": model, "max_tokens": 1, "stream": False}
    try:
        usage = server.post(prompt.path, body).get("usage")
    except ServerError as error:
        return str(error)
    return usage if isinstance(usage, dict) else {}


def _count(warmed: Warmed, line: int, answer: dict[str, Any] | str) -> None:
    if isinstance(answer, str):
        warmed.failed.append((line, answer))
        return
    warmed.sent += 1
    warmed.prompt_tokens += answer.get("prompt_tokens") or 0
    details = answer.get("prompt_tokens_details")
    if details is not None:
        warmed.cached_tokens = (warmed.cached_tokens or 0) + (details.get("cached_tokens") or 0)


def _of_json(number: int, line: str) -> Prompt:
    try:
        held = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"line {number} is not JSON: {error}") from error
    if isinstance(held, dict) and "messages" in held:
        return Prompt(number, "/v1/chat/completions", held)
    if isinstance(held, dict) and "prompt" in held:
        return Prompt(number, "/v1/completions", held)
    ids = isinstance(held, list) and held and all(type(token) is int for token in held)
    if isinstance(held, str) or ids:
        return Prompt(number, "/v1/completions", {"prompt": held})
    raise ConfigError(
        f"line {number} is no prompt: it is to be a text, a list of token ids, or an object with "
        "'prompt' or 'messages'"
    )
