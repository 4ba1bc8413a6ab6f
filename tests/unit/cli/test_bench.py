"""`s3kv bench`: what it measures and leaves behind, and what it makes of its figures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lab.memory_store import MemoryStore
from s3kv.cli import bench
from s3kv.cli.bench import Measurement, Speed, Speeds, expect, percentile
from s3kv.errors import StoreDenied, StoreError, StoreUnavailable
from s3kv.place import Place
from tests import servers
from tests.unit.cli.conftest import Persistent, Run

ROOT = Path(__file__).resolve().parents[3]
SMALL = ("--bytes-per-token", "4KiB", "--prompt-tokens", "5200")  # 20 chunks of 1 MiB


def left(boto: Any) -> list[str]:
    return [o["Key"] for o in boto.list_objects_v2(Bucket=servers.BUCKET).get("Contents", [])]


def test_what_it_measures(run: Run, boto: Any) -> None:
    result = run("bench", *SMALL, "--json", "--set", "max_inflight_requests=4")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["object_bytes"], found["at_once"]) == (2**20, 4)
    for direction in ("put", "get"):
        assert (found[direction]["requests"], found[direction]["nbytes"]) == (20, 20 * 2**20)
        assert 0 < found[direction]["p50_ms"] <= found[direction]["p99_ms"]
    assert found["prompt"]["chunks"] == 20
    assert found["prompt"]["computed_ms"] == pytest.approx(5200 / 8000 * 1e3)
    assert left(boto) == []


def test_as_text(run: Run) -> None:
    result = run("bench", "--bytes-per-token", "512", "--prompt-tokens", "600")
    assert result.exit_code == 0, result.output
    assert "GET of 128.0 KiB, 2 at once" in result.stdout
    assert "A prompt of 600 tokens, 2 chunks" in result.stdout


def test_ctrl_c_leaves_nothing(url: str, boto: Any) -> None:
    where = ["--bucket", servers.BUCKET, "--endpoint-url", url]
    endless = ["--bytes-per-token", "4KiB", "--prompt-tokens", str(256 * 100_000)]
    process = subprocess.Popen(
        [sys.executable, "-m", "s3kv.cli", "bench", *endless, *where],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while len(left(boto)) < 8:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(40) != 0
    finally:
        process.kill()
        process.wait()
    assert left(boto) == []


def speed(seconds: float, p50_ms: float) -> Speed:
    return Speed(32, 2**20, seconds, p50_ms, p50_ms, p50_ms, p50_ms)


@pytest.mark.parametrize(
    ("at_once", "chunks", "doublings"), [(32, 100, 2), (33, 100, 3), (8, 100, 0), (32, 4, 0)]
)
def test_a_prefix_that_is_not_known_costs_a_wait_for_each_doubling(
    at_once: int, chunks: int, doublings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PROBE_CHUNKS", 8)
    speeds = Speeds(2**20, at_once, speed(9, 9), speed(0.5, 80), speed(1, 20))
    expected = expect(speeds, chunks, 2.56)
    assert expected.known_ms == pytest.approx(500)
    assert expected.unknown_ms == pytest.approx(500 + doublings * 20)
    assert expected.computed_ms == pytest.approx(2_560)


async def measured(store: MemoryStore, requests: int = 10) -> Speeds:
    ticks = iter(range(10_000))
    measurement = Measurement(
        store,
        "s3kv/bench/1",
        object_bytes=100,
        at_once=3,
        clock_s=lambda: float(next(ticks)),
        on_progress=lambda *_: None,
    )
    return await measurement.run(requests, 5)


class Troubled(MemoryStore):
    """Fails from PUT number `fails_from` on, and every deletion if it may not delete. Notes how
    many PUTs run at once."""

    def __init__(self, fails_from: int = 10**9, *, may_delete: bool = True) -> None:
        super().__init__(clock=lambda: 0.0)
        self._fails_from, self._may_delete = fails_from, may_delete
        self.running = self.most = 0

    async def begin(self, verb: str, key: str) -> None:
        await super().begin(verb, key)
        if verb == "delete" and not self._may_delete:
            raise StoreDenied("s3:DeleteObject")
        if verb == "put":
            if self.asked["put"] >= self._fails_from:
                raise StoreUnavailable("s3:PutObject")
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0)
            self.running -= 1


@pytest.mark.parametrize(("fails_from", "may_delete"), [(1, False), (5, True)])
async def test_the_first_error_is_told_and_nothing_is_left(
    fails_from: int, may_delete: bool
) -> None:
    store = Troubled(fails_from, may_delete=may_delete)
    with pytest.raises(StoreUnavailable, match="s3:PutObject"):
        await measured(store)
    assert [info async for info in store.list("")] == []


async def test_figures_outlive_a_writer_that_may_not_delete(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (await measured(Troubled(may_delete=False))).get.requests == 10
    told = "s3kv: s3:DeleteObject; s3kv/bench/1/ is left behind\n"
    assert capsys.readouterr().err == told


async def test_as_many_at_once_as_asked_for() -> None:
    store = Troubled()
    speeds = await measured(store)
    assert (store.most, speeds.at_once, speeds.get.requests) == (3, 3, 10)
    assert [info async for info in store.list("")] == []
    assert (await measured(Troubled(), requests=2)).at_once == 2


async def test_an_interrupted_put_is_carried_out_before_its_object_is_deleted() -> None:
    began = asyncio.Event()
    store = Persistent(lambda verb, key: began.set())
    measuring = asyncio.ensure_future(measured(store))
    await began.wait()
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    await asyncio.sleep(0.2)
    assert [info async for info in store.list("")] == []


async def test_what_does_not_come_back_is_said() -> None:
    class Losing(MemoryStore):
        async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
            return True

    with pytest.raises(StoreError, match="None bytes came back"):
        await measured(Losing(clock=lambda: 0.0))


def test_percentiles_are_values_that_were_measured() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, p) for p in (0, 20, 50, 99, 100)] == [1, 1, 3, 5, 5]
