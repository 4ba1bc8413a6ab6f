"""One fault of each kind between an engine that wants encoder outputs and its store.

Each strikes one picture: it is encoded, the tokens are right, and once the fault is over pictures
come from the bucket again. `tests/system/faults` has all faults at every moment, on the
KV connector's side of the same I/O process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from lab.engine import Answer, Engine
from lab.faults import Fault, s3_error
from lab.proxy import proxy
from lab.s3 import S3Server
from tests.system.e2e.pictures import ITEM_BYTES, Pictures, ask, counters, ec_connector

GET = ("GET",)
LINE: dict[str, tuple[Fault, str]] = {
    "gone": (Fault(kind="refuse"), "fetch_failed"),
    "silent": (Fault(kind="black_hole", verbs=GET), "fetch_failed"),
    "reset": (Fault(kind="reset_mid_body", verbs=GET), "fetch_failed"),
    "truncated": (Fault(kind="truncate", verbs=GET), "fetch_failed"),
    "short": (Fault(kind="shorten", verbs=GET, at=-100), "fetch_corrupt"),
    "flipped header": (Fault(kind="flip_body", verbs=GET, at=20), "fetch_corrupt"),
    "flipped payload": (Fault(kind="flip_body", verbs=GET, at=-5), "fetch_corrupt"),
    "failing": (s3_error(500, "InternalError", verbs=GET), "fetch_failed"),
    "overloaded": (s3_error(503, "SlowDown", verbs=GET), "fetch_failed"),
    "forbidden": (s3_error(403, "AccessDenied", verbs=GET), "fetch_denied"),
    # Last, because its fetch may end after its request, and is counted as failed then.
    "slow": (Fault(kind="trickle", verbs=GET, nbytes=100, seconds=0.2), "deadline_cuts"),
}
"""What happens on the way, and the counter that tells of it."""
SOON = {
    "request_timeout_ms": 8_000,
    "max_attempts": 1,
    "max_wait_ms": 8_000,
    "min_bytes_per_s": 1,
    "hedge_percent": 0.0,
    "miss_ttl_s": 0.0,
}
"""Seconds between what is told apart by time: silence is given up after 4 s, the request goes on
after 8 s, and the slow answer, which no timeout strikes, takes 24 s."""


def another(objects: dict[str, bytes], key: str) -> bytes:
    """A valid item of the same namespace, of another picture."""
    return next(data for name, data in objects.items() if name != key)


FORGED: dict[str, Callable[[dict[str, bytes], str], bytes]] = {
    "another item": another,
    "another item's payload": lambda o, key: o[key][:4096] + another(o, key)[4096:],
    "another item's header": lambda o, key: another(o, key)[:4096] + o[key][4096:],
    "zeros": lambda o, key: bytes(len(o[key])),
    "nothing": lambda o, key: b"",
    "something longer": lambda o, key: o[key] + b"\0",
}
"""What lies in the bucket in place of the item."""
SPARE = 10
PICTURES = list(range(100, 100 + 2 * (len(LINE) + len(FORGED)) + SPARE))


class Struck:
    """An engine, and a picture it has not seen whenever it is asked."""

    def __init__(self, engine: Engine, expected: list[Answer]) -> None:
        self._engine = engine
        self._left = list(zip(PICTURES, expected, strict=True))

    def ask(self) -> Counter[str]:
        """Ask for the next picture; what that was counted as."""
        picture, expected = self._left.pop(0)
        before = counters(self._engine)
        (answer,) = self._engine.generate([ask(picture)])
        assert answer.finish_reason == "length"
        assert answer.tokens == expected.tokens
        return counters(self._engine) - before

    def recovers(self) -> bool:
        """A picture comes from the bucket: the next one, unless the machine is so busy that the
        short timeouts here are too short for a store without a fault."""
        return any(
            (seen["encoded"], seen["hits"]) == (0, 1) for seen in (self.ask() for _ in range(3))
        )


@pytest.mark.long
def test_one_of_each_kind(pictures: Pictures, s3: S3Server, bucket: str) -> None:
    with pictures(ec_connector(s3, bucket)) as engine:
        right = engine.generate([ask(picture) for picture in PICTURES], concurrency=4)
    client = s3.client()
    objects = s3.contents(bucket)
    assert [len(data) for data in objects.values()] == [ITEM_BYTES] * len(PICTURES)

    def put(change: Callable[[dict[str, bytes], str], bytes]) -> None:
        for key in objects:
            client.put_object(Bucket=bucket, Key=key, Body=change(objects, key))

    with (
        proxy(str(s3.url)) as store,
        pictures(ec_connector(s3, bucket, "ec_consumer", endpoint_url=store.url, **SOON)) as engine,
    ):
        struck = Struck(engine, right)
        for name, (fault, counter) in LINE.items():
            store.fault(fault)
            seen = struck.ask()
            store.lift()
            assert (seen["encoded"], seen["hits"], seen[counter]) == (1, 0, 1), (name, seen)
            assert struck.recovers(), f"after {name}"
        for name, forge in FORGED.items():
            put(forge)
            seen = struck.ask()
            assert (seen["encoded"], seen["hits"], seen["fetch_corrupt"]) == (1, 0, 1), (name, seen)
            put(lambda objects, key: objects[key])
            assert struck.recovers(), f"after {name}"
