"""The requests of a trace: which prefixes they share, when they arrive, at which engine."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 512
"""What one hash id of the trace covers, and therefore what one chunk is here."""

_LAST_GAP_S = 1.0
"""Over what time the arrivals of the last time stamp are spread; there is no next one to tell."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `hashes` has one block hash per *full* chunk of its prompt; `session` is equal
    for requests that a router with sticky sessions would send to the same engine."""

    number: int
    time_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[bytes, ...]
    session: int

    def engine(self, engines: int, routing: str) -> int:
        """round-robin: in turn. session: all requests of one conversation to the same engine."""
        if routing == "round-robin":
            return self.number % engines
        mixed = blake2b(self.session.to_bytes(8, "little", signed=True), digest_size=8).digest()
        return int.from_bytes(mixed, "little") % engines


def load(path: Path, limit: int | None = None) -> list[Arrival]:
    """The first `limit` requests of a Mooncake trace, in order of arrival.

    The traces stamp arrivals in steps of three seconds. Requests of one stamp are spread evenly
    until the next one, or an hour of traffic would be 1,200 bursts.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()[:limit]]
    groups = [list(group) for _, group in groupby(lines, lambda line: line["timestamp"])]
    starts_s = [group[0]["timestamp"] / 1000 for group in groups]
    if starts_s != sorted(starts_s):
        raise ValueError(f"{path}: time stamps go back; sort the trace by timestamp first")
    arrivals: list[Arrival] = []
    for group, start_s, end_s in zip(
        groups, starts_s, [*starts_s[1:], starts_s[-1] + _LAST_GAP_S], strict=True
    ):
        for place, line in enumerate(group):
            time_s = start_s + (end_s - start_s) * place / len(group)
            arrivals.append(_arrival(len(arrivals), time_s, line))
    return arrivals


def _arrival(number: int, time_s: float, line: dict[str, int | list[int]]) -> Arrival:
    ids, prompt_tokens, output_tokens = (
        line["hash_ids"],
        line["input_length"],
        line["output_length"],
    )
    assert isinstance(ids, list)
    assert isinstance(prompt_tokens, int)
    assert isinstance(output_tokens, int)
    # The first chunk is a system prompt that all requests share: the second tells whose it is.
    session = ids[1] if len(ids) > 1 else -number
    hashes = tuple(block_hash(i) for i in ids[: prompt_tokens // CHUNK_TOKENS])
    return Arrival(number, time_s, prompt_tokens, output_tokens, hashes, session)


@cache
def block_hash(hash_id: int) -> bytes:
    return blake2b(hash_id.to_bytes(8, "little"), digest_size=32).digest()


def identity(trace: Path, requests: int) -> dict[str, Any]:
    """Which trace a result is of."""
    digest = hashlib.sha256(trace.read_bytes()).hexdigest()
    return {"file": trace.name, "sha256": digest, "requests": requests}


def command(benchmark: str, arguments: Sequence[str] | None, trace: Path) -> str:
    """What repeats a result, without the folder the trace is in. None: this process's arguments."""
    given = sys.argv[1:] if arguments is None else arguments
    words = [Path(word).name if word == str(trace) else word for word in given]
    return " ".join([f"python -m benchmarks.{benchmark}", *words])
