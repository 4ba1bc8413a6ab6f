"""A running vLLM server, over HTTP. Blocking; every call may be made from any thread."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from s3kv.errors import S3KVError

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_SAID_CHARS = 300


class ServerError(S3KVError):
    """The server cannot be reached, or refuses. The message says what to look at."""


@dataclass(frozen=True, slots=True)
class Server:
    """url: without a path, as in http://localhost:8000. api_key: that of `vllm serve --api-key`."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0

    def models(self) -> list[str]:
        """The names under which models are served. Raises `ServerError`."""
        return [str(model["id"]) for model in self._ask("/v1/models")["data"]]

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request of OpenAI's API. Raises `ServerError`."""
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        text = _fetch(
            urllib.request.Request(self.url.rstrip("/") + path, body, headers), self.timeout_s
        )
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerError(f"{self.url}{path} does not answer with JSON: is it a vLLM server?")
        return answer


def fetch_text(url: str) -> str:
    """What stands at an address. Raises `ServerError`."""
    return _fetch(urllib.request.Request(url), timeout_s=30.0)


def sums_by_key(exposition: str, labels: Sequence[str]) -> dict[str, float]:
    """Samples of Prometheus's text format, summed over all labels but these.

    A key is the metric's name, and after a bar each the values of those of `labels` that a sample
    has, in their order.
    """
    sums: dict[str, float] = {}
    for line in exposition.splitlines():
        sample = _SAMPLE.match(line)
        if sample is not None:
            own = dict(_LABEL.findall(sample[2] or ""))
            key = "|".join([sample[1], *(own[label] for label in labels if label in own)])
            sums[key] = sums.get(key, 0.0) + float(sample[3])
    return sums


def _fetch(request: urllib.request.Request, timeout_s: float) -> str:
    url = request.full_url
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return str(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        with error:
            said = error.read().decode(errors="replace")[:_SAID_CHARS]
        raise ServerError(f"{url} answers {error.code}: {_message(said)}") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ServerError(
            f"nobody answers at {url} ({reason}): look at --url, and whether the server has started"
        ) from error


def _message(said: str) -> str:
    """The sentence in an error of OpenAI's API, or all of it."""
    found = re.search(r'"message":\s*"((?:[^"\\]|\\.)*)"', said)
    return str(json.loads(f'"{found[1]}"')) if found else said
