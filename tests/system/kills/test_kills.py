"""SIGKILL at any moment, under load: nothing wrong, nothing left, the next start clean.

An engine process with two workers and their I/O processes serves from one bucket, life after life.
In every life I/O processes are killed, and in the end a worker or the engine. Most lives compress
what they save, and some encrypt it. Each checks the bytes of everything it loads; between lives
every object in the bucket is verified.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lab.constants import changed, environment
from lab.s3 import S3Server, moto_process
from s3kv.config import KEYS_VARIABLE
from s3kv.objects import keys
from s3kv.objects.keys import ChunkAddress
from s3kv.types import ChunkKey
from tests.project import ROOT
from tests.system.kills.aftermath import check_objects, processes_marked, shared_files, slabs
from tests.system.kills.prompts import dictionary
from tests.system.kills.worker import PADDING_BYTES, SETUP, shard
from tests.system.sim.encrypting import NEW, OLD, Names, Secrets
from tests.waiting import wait_until

BUCKET = "kills"
LIVES_AND_IO_KILLS = [(5, 18), pytest.param(5, 19, marks=pytest.mark.long)]
"""Each life ends with another kill; with those of `e2e/test_kills.py` that makes fifty."""
NIGHTLY = (100, 370)

PROGRESS = ("fetch OK", "upload OK")
CONSTANTS = {"least_compressed_bytes": 1, "encrypted_segment_bytes": 40_000}
"""What is uploaded can be compressed, and has several encrypted segments if it is not."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a life saves. It reads compressed objects in any case, encrypted ones by its secrets."""

    compress: str
    secrets: Secrets = ()

    @property
    def settings(self) -> dict[str, str]:
        return {"compress": self.compress, "encryption": "aes-gcm" if self.secrets else "off"}

    @classmethod
    def draw(cls, rng: random.Random) -> Form:
        return cls(rng.choice(["on", "on", "off"]), rng.choice([(), (NEW, OLD), (OLD,)]))


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with moto_process() as server:
        server.client().create_bucket(Bucket=BUCKET)
        yield server


class Victim:
    """One life of the engine, seen from outside."""

    def __init__(self, s3: S3Server, seed: int, log_path: Path, form: Form) -> None:
        self.marker = f"S3KV_VICTIM={uuid.uuid4().hex}"
        self.log_path = log_path
        name, _, value = self.marker.partition("=")
        env = {**os.environ, **s3.env, **environment(CONSTANTS, str(ROOT)), name: value}
        env[KEYS_VARIABLE] = "\n".join(secret.hex() for secret in form.secrets)
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.system.kills.engine"),
                    *(str(s3.url), BUCKET, str(seed), json.dumps(form.settings)),
                ],
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.said: dict[str, Any] = {}
        self._unread = b""

    def listen(self) -> dict[str, Any]:
        """The latest it has said."""
        while select.select([self.process.stdout], [], [], 0)[0]:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                break
            *lines, self._unread = (self._unread + data).split(b"\n")
            if lines:
                self.said = json.loads(lines[-1])
        return self.said

    def count(self, event: str) -> int:
        said = self.listen()
        assert self.process.poll() is None, self.log_path.read_text()
        return int(said.get("counters", {}).get(event, 0))

    def progress(self) -> list[int]:
        return [self.count(event) for event in PROGRESS]

    def wait_for_progress(self) -> None:
        """Something more is fetched, and something more is uploaded or found to be there."""
        before = self.progress()
        wait_until(
            f"more than {before} is fetched and uploaded",
            lambda: any(n > old for n, old in zip(self.progress(), before, strict=True)),
        )

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def wait_until_gone(self) -> None:
        wait_until("all processes end", lambda: not processes_marked(self.marker))
        self.process.wait()

    def close(self) -> None:
        for pid in processes_marked(self.marker):
            self.kill(pid)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


class Run:
    """Life after life on one bucket, from a seed."""

    def __init__(self, s3: S3Server, directory: Path, seed: int) -> None:
        self._s3 = s3
        self._directory = directory
        self._rng = random.Random(seed)
        self._words = dictionary()
        self._names = Names(CONSTANTS["encrypted_segment_bytes"], pytest.fail)
        self.kills = 0

    def live(self, number: int, io_kills: int) -> None:
        rng = self._rng
        self._lose_half()
        log_path = self._directory / f"life-{number}.log"
        victim = Victim(self._s3, rng.randrange(2**32), log_path, Form.draw(rng))
        try:
            victim.wait_for_progress()
            for _ in range(io_kills):
                self._kill_io_process(victim)
            time.sleep(rng.uniform(0.0, 0.5))
            self._kill_for_good(victim, rng.choice(["engine", "worker"]))
        except AssertionError as error:
            log = victim.log_path.read_text()
            raise AssertionError(
                f"{error}\nlife {number} said last: {victim.said}\n{log}"
            ) from None
        finally:
            victim.close()
        self._check_objects()

    def _check_objects(self) -> int:
        with changed(**CONSTANTS):
            return check_objects(self._s3, BUCKET, self._check_payload, self._decrypt)

    def _decrypt(self, name: str, data: bytes) -> tuple[str, bytes]:
        address = keys.parse(name)
        if address is None or not address.is_encrypted:
            return name, data
        if self._names.object_of(name) == name:  # the first one of its namespace
            for block_hash, rank in product(self._words.hashes, range(SETUP.world_size)):
                chunk = ChunkKey(address.key.group, block_hash)
                self._names.of(address.namespace.chunk(chunk, shard(rank).name), (NEW, OLD))
        opened = self._names.opened(name, data)
        assert opened is not None, f"{name}, {len(data)} bytes, does not decrypt"
        return self._names.object_of(name), opened

    def _kill_io_process(self, victim: Victim) -> None:
        time.sleep(self._rng.uniform(0.0, 0.3))
        rank = self._rng.randrange(SETUP.world_size)
        pid = victim.listen()["io"][rank]
        if pid is None:  # not started again yet, after the kill before
            wait_until("it is started", lambda: victim.listen()["io"][rank] is not None)
            pid = victim.said["io"][rank]
        victim.kill(pid)
        self.kills += 1
        wait_until(
            "another I/O process is started",
            lambda: victim.progress() and victim.said["io"][rank] not in (None, pid),
        )
        victim.wait_for_progress()

    def _kill_for_good(self, victim: Victim, whom: str) -> None:
        pids = processes_marked(victim.marker)
        held, files = slabs(pids), shared_files(pids)
        assert len(held) == SETUP.world_size, "one slab for each rank"
        said = victim.said
        victim.kill(said["engine"] if whom == "engine" else self._rng.choice(said["workers"]))
        self.kills += 1
        victim.wait_until_gone()
        log = victim.log_path.read_text()
        assert "AssertionError" not in log, log
        assert "SlotError" not in log, log
        # A process gives back its memory, and with it its environment, before its files.
        wait_until("nobody holds a slab", lambda: not held & slabs())
        assert not [name for name in files if Path(name).exists()]

    def _lose_half(self) -> None:
        client = self._s3.client()
        for key in sorted(self._s3.objects(BUCKET)):
            if self._rng.random() < 0.5:
                client.delete_object(Bucket=BUCKET, Key=key)

    def _check_payload(self, address: ChunkAddress, payload: memoryview) -> None:
        chain = self._words.covered(address.key.block_hash)
        assert chain, f"{address} is of no prompt"
        tokens = [(0, prefix) for prefix in chain[-SETUP.chunk_tokens :]]
        (rank,) = (r for r in range(SETUP.world_size) if shard(r).name == address.shard)
        expected = shard(rank).payload(tokens, SETUP.block_tokens)
        assert payload[: len(expected)] == expected, f"{address} holds other bytes"

    def end_well(self) -> None:
        """After all that: one life that is not killed, and has nothing left at its end."""
        log_path = self._directory / "last.log"
        victim = Victim(self._s3, self._rng.randrange(2**32), log_path, Form("on", (NEW, OLD)))
        try:
            wait_until("it loads from the bucket", lambda: victim.count("hit_tokens_bucket") > 0)
            victim.process.stdin.close()
            victim.process.wait(240)  # it gives itself 120 s to come to rest
            assert victim.process.returncode == 0, victim.log_path.read_text()
            assert victim.listen().get("rests"), victim.log_path.read_text()
            victim.wait_until_gone()
        finally:
            victim.close()
        assert self._check_objects() > 0
        objects = self._s3.objects(BUCKET)
        assert min(objects.values()) < PADDING_BYTES, "some are compressed"
        assert any(".encrypted." in name for name in objects), "some are encrypted"


def run(s3: S3Server, directory: Path, lives: int, io_kills: int) -> None:
    seed = int(os.environ.get("S3KV_SEED", random.SystemRandom().randrange(2**32)))
    print(f"S3KV_SEED={seed}")
    run = Run(s3, directory, seed)
    for life in range(lives):
        run.live(life, io_kills * (life + 1) // lives - io_kills * life // lives)
    assert run.kills == lives + io_kills
    run.end_well()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("lives", "io_kills"), LIVES_AND_IO_KILLS)
def test_killed_at_any_moment(s3: S3Server, tmp_path: Path, lives: int, io_kills: int) -> None:
    run(s3, tmp_path, lives, io_kills)


@pytest.mark.nightly
@pytest.mark.timeout(6_000)
def test_killed_very_often(s3: S3Server, tmp_path: Path) -> None:
    run(s3, tmp_path, *NIGHTLY)
