"""Set-up of a tier: which namespace it gets, and that nothing is left after a fault."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from lab.constants import changed
from s3kv.config import Config
from s3kv.errors import (
    ConfigError,
    IoProcessError,
    StoreMissing,
    StoreUnavailable,
    UnsupportedError,
)
from s3kv.host.limits import memory_limits
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from s3kv.io.tier import Slots, introduce, open_tier, try_bucket
from s3kv.io.wire import START_TIMEOUT_S, Handshake, Ready
from s3kv.messages import BucketJob, JobKind
from s3kv.objects.keys import fingerprint_digest
from s3kv.stores.s3 import kms
from s3kv.types import ChunkKey, Outcome, TensorSpec
from tests.servers import BUCKET, REGION, forget_credentials, set_credentials
from tests.unit.io import rig
from tests.waiting import wait_until

IDENTITY = {"model": "m", "layers": [1, 2]}
SLAB_BYTES = 2**20


@pytest.fixture
def config(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    set_credentials(monkeypatch)
    return Config(bucket=BUCKET, endpoint_url=moto_url, region=REGION)


def secret(path: Path, text: str) -> dict[str, Any]:
    path.write_text(text)
    path.chmod(0o600)
    return {"integrity": "blake3-keyed", "integrity_secret_file": str(path)}


def introduced(**settings: Any) -> Handshake:
    return introduce(Config(bucket=BUCKET, **settings), IDENTITY, rig.SHARD, {0: rig.TENSORS})


def maps() -> str:
    return Path("/proc/self/maps").read_text("ascii")


def test_a_namespace_is_the_identity_and_the_way_its_objects_are_sealed(tmp_path: Path) -> None:
    keyed = secret(tmp_path / "one", "a secret of one fleet of engines")
    other = secret(tmp_path / "other", "a secret of another fleet of engines")
    handshakes = [
        introduced(),
        introduced(integrity="none"),
        introduced(**keyed),
        introduced(**other),
    ]
    assert len({handshake.namespace_digest for handshake in handshakes}) == 4
    for handshake in handshakes:
        fingerprint = json.loads(handshake.manifest)
        assert fingerprint == {**IDENTITY, "integrity": handshake.integrity.identity()}
        assert handshake.namespace_digest == fingerprint_digest(fingerprint)
        assert b"fleet" not in handshake.manifest


def test_one_process_of_several_writes_the_manifest() -> None:
    config = Config(bucket=BUCKET)
    other = introduce(config, IDENTITY, rig.SHARD, {0: rig.TENSORS}, writes_manifest=False)
    assert other.manifest == b""
    assert other.namespace_digest == introduced().namespace_digest


def test_an_identity_is_made_of_json_values() -> None:
    with pytest.raises(TypeError):
        introduce(Config(bucket=BUCKET), {"model": object()}, rig.SHARD)


def test_slots_have_room_for_an_object_and_begin_on_a_page() -> None:
    slots = Slots.of(introduced(host_bytes=100 * rig.SLOT_BYTES + 1))
    assert (slots.slot_bytes, slots.count) == (rig.SLOT_BYTES, 100)
    assert slots.nbytes == 100 * rig.SLOT_BYTES
    assert slots.formats[0].object_bytes <= slots.slot_bytes


def test_slots_are_pages_if_there_are_objects_of_several_groups() -> None:
    """The longest begins at a multiple of the next power of two, so there has to be so much."""
    sizes = {0: 2**20, 1: 2**19}
    groups = {n: (TensorSpec("layer.0", "U8", (nbytes,)),) for n, nbytes in sizes.items()}
    config = Config(bucket=BUCKET, host_bytes=2**21)
    slots = Slots.of(introduce(config, IDENTITY, rig.SHARD, groups))
    assert (slots.slot_bytes, slots.count) == (4096, 512)
    assert max(chunk.object_bytes for chunk in slots.formats.values()) > slots.slot_bytes
    small = introduce(Config(bucket=BUCKET, host_bytes=2**21 - 1), IDENTITY, rig.SHARD, groups)
    with pytest.raises(ConfigError, match="allowed is 2097152 or more"):
        Slots.of(small)


def test_the_objects_of_each_group_begin_at_its_first_block() -> None:
    handshake = introduce(
        Config(bucket=BUCKET), IDENTITY, rig.SHARD, {0: rig.TENSORS}, first_blocks={0: 3}
    )
    assert Slots.of(handshake).formats[0].first_block == 3
    assert Slots.of(introduced()).formats[0].first_block == 0


def test_memory_that_holds_no_object_is_refused_with_advice() -> None:
    large = {0: (TensorSpec("layer.0", "U8", (2**20,)),)}
    handshake = introduce(Config(bucket=BUCKET, host_bytes=2**20), IDENTITY, rig.SHARD, large)
    with pytest.raises(ConfigError, match=r"allowed is 1052672 or more.* \(ask less\)"):
        Slots.of(handshake, " (ask less)")


def test_a_worker_waits_for_kms_and_for_the_bucket_one_after_the_other() -> None:
    """Or it would give up first, without the reason."""
    waits: list[float] = []
    client = mock.Mock(wait_ready=lambda seconds: waits.append(seconds) or Ready(True, None, ""))
    try_bucket(client)
    process_start_s = 90.0  # as measured on two busy cores
    assert waits[0] > kms.ANSWER_S + START_TIMEOUT_S + process_start_s


def test_an_open_tier_has_tried_the_bucket_and_can_be_closed_twice(config: Config) -> None:
    handshake = introduce(config, IDENTITY, rig.SHARD, {0: rig.TENSORS})
    tier = open_tier(SLAB_BYTES, handshake)
    assert tier.handshake is handshake
    assert tier.known is False
    assert tier.slab.nbytes == SLAB_BYTES
    pid = tier.client.pid
    tier.close()
    tier.close()
    assert not Path(f"/proc/{pid}").exists()
    assert tier.slab.fd < 0


def test_a_handshake_can_be_made_once_the_slab_is_there(config: Config) -> None:
    seen: list[Slab] = []

    def handshake(slab: Slab) -> Handshake:
        seen.append(slab)
        return introduced()

    tier = open_tier(SLAB_BYTES, handshake, wait=None)
    tier.close()
    assert seen == [tier.slab]
    assert tier.known is None


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_started(config: Config) -> None:
    """Although this slab alone would fit."""
    each = memory_limits().available_bytes
    handshake = introduce(config, IDENTITY, rig.SHARD, {0: rig.TENSORS})
    before, children = maps().count("s3kv-slab"), psutil.Process().children()
    with pytest.raises(ConfigError, match=rf"3 × {each:,} \(host_bytes, per rank\)"):
        open_tier(SLAB_BYTES, handshake, planned=((3, each, "host_bytes, per rank"),))
    assert maps().count("s3kv-slab") <= before
    assert set(psutil.Process().children()) <= set(children)


def descriptors() -> set[str]:
    """The descriptors of this process, each with its file."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one by which they were listed
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


@pytest.mark.parametrize("fault", ["bucket", "wait", "start", "handshake"])
def test_nothing_is_left_when_a_start_fails(
    config: Config, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise IoProcessError("not today")

    wait = refuse if fault == "wait" else try_bucket
    if fault == "bucket":
        config = dataclasses.replace(config, bucket="s3kv-nobody-has-it")
    if fault == "start":
        monkeypatch.setattr(IoClient, "start", refuse)
    handshake: Any = introduce(config, IDENTITY, rig.SHARD, {0: rig.TENSORS})
    if fault == "handshake":
        handshake = refuse
    before, known = maps().count("s3kv-slab"), descriptors()
    with pytest.raises(StoreMissing if fault == "bucket" else IoProcessError):
        open_tier(SLAB_BYTES, handshake, wait=wait)
    assert maps().count("s3kv-slab") <= before
    # Some of an earlier test's may be gone by now, and moto, in this process, closes late.
    wait_until("only known descriptors are open", lambda: descriptors() <= known, 60.0)


def test_a_bucket_that_is_not_needed_is_said_to_be_away(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """With `on_unavailable` "serve", silence would hide that nothing is kept."""
    config = dataclasses.replace(config, bucket="s3kv-nobody-has-it", on_unavailable="serve")
    open_tier(SLAB_BYTES, introduce(config, IDENTITY, rig.SHARD, {0: rig.TENSORS})).close()
    assert "serves without the bucket for now" in caplog.text


@pytest.fixture
def silent(config: Config) -> Iterator[Config]:
    """A bucket whose server takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with changed(start_timeout_s=0.3):
            yield dataclasses.replace(config, endpoint_url=url, request_timeout_ms=60_000)


def test_a_server_that_says_nothing_delays_a_start_and_no_more(silent: Config) -> None:
    config = dataclasses.replace(silent, on_unavailable="serve")
    tier = open_tier(SLAB_BYTES, introduce(config, IDENTITY, rig.SHARD, {0: rig.TENSORS}))
    tier.close()
    assert tier.known is None


def test_a_server_that_says_nothing_is_given_up(silent: Config) -> None:
    config = dataclasses.replace(silent, on_unavailable="fail")
    handshake = introduce(config, IDENTITY, rig.SHARD, {0: rig.TENSORS})
    with pytest.raises(StoreUnavailable, match=r"no answer within 0\.3 s"):
        open_tier(SLAB_BYTES, handshake)


def test_helper_programs_of_credentials_can_be_stopped(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The I/O process itself stays when its group is told to stop."""
    helper, seen, settings = (tmp_path / name for name in ("helper", "seen", "config"))
    keys = '{"Version": 1, "AccessKeyId": "testing", "SecretAccessKey": "testing-secret"}'
    helper.write_text(f"#!/bin/sh\ngrep SigIgn /proc/self/status > '{seen}'\necho '{keys}'\n")
    helper.chmod(0o700)
    settings.write_text(f"[default]\ncredential_process = {helper}\n")
    forget_credentials(monkeypatch)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    open_tier(SLAB_BYTES, introduce(config, IDENTITY, rig.SHARD, {0: rig.TENSORS})).close()
    ignored = int(seen.read_text().split()[1], 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        assert not ignored >> (number - 1) & 1, number.name


def test_rows_of_borrowed_memory_move_without_their_headers(config: Config, tmp_path: Path) -> None:
    row_bytes, rows = 2 * mmap.PAGESIZE, 4
    with open(tmp_path / "rows", "w+b") as file:
        file.truncate(row_bytes * rows)
        mapped = mmap.mmap(file.fileno(), 0)
        slab = Slab.behind(memoryview(mapped))
    (tmp_path / "rows").unlink()
    row = (TensorSpec("kv", "U8", (row_bytes,)),)
    tier = open_tier(slab, introduce(config, IDENTITY, rig.SHARD, {0: row}, row_bytes=row_bytes))
    try:
        mapped[row_bytes : 2 * row_bytes] = random.Random(3).randbytes(row_bytes)
        for number, (kind, slot) in enumerate([(JobKind.UPLOAD, 1), (JobKind.FETCH, 3)]):
            tier.client.submit(BucketJob(number, kind, ChunkKey(0, bytes(32)), slot))
            tier.client.settle(250)
            (end,) = tier.client.poll()
            assert end.outcome is Outcome.OK, end
        empty = bytes(row_bytes)
        found = [mapped[n * row_bytes : (n + 1) * row_bytes] for n in range(rows)]
        assert found == [empty, found[1], empty, found[1]]
        assert found[1] != empty
    finally:
        tier.close()


def test_memory_without_a_file_cannot_be_borrowed() -> None:
    with pytest.raises(UnsupportedError, match="no file of 4,096 bytes"):
        Slab.behind(memoryview(bytearray(4096)))
