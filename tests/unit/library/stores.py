"""What tests of the library share: a bucket of their own, blocks by number, and slow threads."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from s3kv.config import Config
from s3kv.library.tiered_store import TieredStore
from tests.servers import BUCKET, REGION, moto_server, set_credentials

SHAPES = {"k": ((4, 64), torch.bfloat16), "v": ((4, 64), torch.float32)}
NAMESPACE = {"model": "test"}


@contextmanager
def fresh_bucket(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Config]:
    """With a prefix of its own: all servers of one process hold the same objects."""
    set_credentials(monkeypatch)
    with moto_server() as url:
        yield Config(
            bucket=BUCKET,
            prefix=uuid.uuid4().hex,
            endpoint_url=url,
            region=REGION,
            **{"host_bytes": 2**20, **settings},
        )


def hash_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def block(number: int, shapes: Shapes = SHAPES) -> dict[str, torch.Tensor]:
    """Its content follows from its number."""
    generator = torch.Generator().manual_seed(number)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, (shape, dtype) in shapes.items()
    }


def room() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}


def opening(config: Config, **more: Any) -> Any:
    return TieredStore.open(config, **{"shapes": SHAPES, "namespace": NAMESPACE, **more})


def big(number: int, nbytes: int) -> dict[str, torch.Tensor]:
    """Of 1 MiB of host memory, the least there is, it takes a large part."""
    return {"big": torch.full((nbytes,), number, dtype=torch.uint8)}


def opening_big(config: Config, nbytes: int, **more: Any) -> Any:
    return opening(config, shapes={"big": ((nbytes,), torch.uint8)}, **more)


def new_pools(blocks: int) -> dict[str, torch.Tensor]:
    return {n: torch.zeros((blocks, *s), dtype=dtype) for n, (s, dtype) in SHAPES.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


async def gives(store: TieredStore, number: int, shapes: Shapes = SHAPES) -> bool:
    """Whether the store has this block, with the right content."""
    right = block(number, shapes)
    into = {name: torch.zeros_like(tensor) for name, tensor in right.items()}
    return await store.get(hash_of(number), into) and same(into, right)


class SlowThreads(ThreadPoolExecutor):
    """Threads that wait before they begin anything. In `run_in_executor` the work has begun all the
    same: nobody can call it back.

    delay: called when work is given to them; what it returns is called in the thread, and waits.
    """

    def __init__(self, delay: Callable[[], Callable[[], object]]) -> None:
        super().__init__(max_workers=8)
        self._delay = delay

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        wait = self._delay()

        def late() -> Any:
            assert wait() is not False, "the gate stayed shut"
            return work(*args, **named)

        return super().submit(late)


def gated_threads() -> tuple[threading.Event, SlowThreads]:
    """A gate, and threads that begin nothing before it is open."""
    gate = threading.Event()
    return gate, SlowThreads(lambda: partial(gate.wait, 30))
