"""A router that follows the KV events of an engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from lab import models
from tests.system.e2e.conftest import Rig, at_rest, cached, changed

PROMPTS = models.prompts(2, 800)
CHUNK_BYTES = 256 * 2_048 + 2 * 4_096
BLOCKS = 6
"""Of 128 tokens, in the three chunks of a prompt; the engine's own cache holds as many."""


class Router:
    """Follows the events of one engine. `holds`: medium → block hash → tokens."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self.holds: dict[str, dict[Any, tuple[int, ...]]] = defaultdict(dict)
        self.removed: dict[str, set[Any]] = defaultdict(set)
        self.cleared = 0
        self._heard = -1

    def listen(self, last: int) -> None:
        """Take in what comes, up to the batch of this number."""
        while self._heard < last:
            assert self._socket.poll(100_000), f"batch {last} is lost: {self._heard} came last"
            _, number, payload = self._socket.recv_multipart()
            self._heard = int.from_bytes(number, "big")
            _, events, *_ = msgspec.msgpack.decode(payload)
            for event in events:
                self._take_in(event)

    def _take_in(self, event: dict[str, Any]) -> None:
        held = self.holds[event.get("medium", "")]
        if event["type"] == "BlockStored":
            size, tokens = event["block_size"], event["token_ids"]
            assert len(tokens) == size * len(event["block_hashes"])
            for at, block_hash in enumerate(event["block_hashes"]):
                held[block_hash] = tuple(tokens[at * size : (at + 1) * size])
        elif event["type"] == "BlockRemoved":
            for block_hash in event["block_hashes"]:
                held.pop(block_hash, None)
                self.removed[event["medium"]].add(block_hash)
        else:
            assert event["type"] == "AllBlocksCleared"
            self.holds.clear()
            self.cleared += 1

    def tokens(self, medium: str) -> set[tuple[int, ...]]:
        return set(self.holds[medium].values())

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    router = Router(f"ipc://{tmp_path}/events")
    yield router
    router.close()


def blocks(prompt: list[int]) -> set[tuple[int, ...]]:
    return {tuple(prompt[at : at + 128]) for at in range(0, 128 * BLOCKS, 128)}


def test_routers_are_told_what_becomes_of_chunks(rig: Rig, router: Router) -> None:
    first, second = PROMPTS
    # Host memory for one prompt, so that every prompt puts the one before it out.
    little = changed(rig.patient, chunk_tokens=256, host_bytes=3 * CHUNK_BYTES)
    publish = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{rig.tmp_path}/events",
    }
    with rig.serve(rig.tiny, little, kv_events_config=publish) as engine:

        def listen() -> None:
            router.listen(engine.call("tests.system.e2e.inside:published"))

        def ask(prompt: list[int]) -> int | None:
            (answer,) = engine.generate([prompt])
            at_rest(engine)
            engine.generate([prompt[:8]], max_tokens=1)  # events come with a step
            listen()
            return cached([answer])[0]

        ask(first)
        assert router.tokens("CPU") == router.tokens("STORAGE") == blocks(first)
        # In the hashes of the engine's own events, so that both can be followed as one.
        assert router.holds["CPU"].items() <= router.holds["GPU"].items()

        ask(second)
        assert router.tokens("CPU") == blocks(second), "the first had to leave"
        assert router.tokens("STORAGE") == blocks(first) | blocks(second)

        engine.reset_prefix_cache()
        assert ask(first) == 128 * BLOCKS
        assert router.cleared == 1, "vLLM knows no other word for an empty GPU cache"
        assert router.tokens("CPU") == router.tokens("STORAGE") == blocks(first)

        ask(second)
        router.removed.clear()  # what the bucket has shown again was withdrawn first
        for key in rig.objects():
            rig.s3.client().delete_object(Bucket=rig.bucket, Key=key)
        engine.reset_prefix_cache()
        assert ask(first) == 0
        # A slow answer for a chunk behind the first leaves its save to the next request.
        ask(first)
        removed = router.removed["STORAGE"]
        assert removed
        assert removed <= set(router.holds["STORAGE"])
        assert router.tokens("STORAGE") == blocks(first), "and what was computed is there again"

        engine.reset_prefix_cache(connector=True)
        engine.generate([first[:8]], max_tokens=1)
        listen()
        assert not router.tokens("CPU") | router.tokens("STORAGE")
