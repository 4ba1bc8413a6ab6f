"""The examination of a bucket, on the reference store and on a client of its own."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from lab.memory_store import MemoryStore, Refusing
from s3kv.cli.doctor.bucket import BucketExamination
from s3kv.cli.doctor.findings import Finding
from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreError, StoreUnavailable
from s3kv.place import Place
from s3kv.stores.store import ObjectStore
from tests.unit.cli.conftest import Persistent, Run, left
from tests.unit.cli.doctor.conftest import CHECKS, SMALL, findings, statuses

pytestmark = pytest.mark.usefixtures("no_torch")


def test_all_is_well(run: Run, boto: Any) -> None:
    result = run("doctor", *SMALL)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["healthy"] is True
    assert statuses(result) == dict.fromkeys(CHECKS, "ok")
    assert "(1 MiB each)" in findings(result)["bandwidth"]["detail"]
    assert left(boto) == set()


def test_read_only_writes_nothing(run: Run, boto: Any) -> None:
    result = run("doctor", "--read-only", *SMALL)
    assert result.exit_code == 0, result.output
    found = statuses(result)
    assert {check for check, status in found.items() if status == "ok"} == {"list", "get"}
    assert set(found.values()) == {"ok", "skipped"}
    assert left(boto) == set()


def test_no_bandwidth_if_none_is_wanted(run: Run) -> None:
    found = findings(run("doctor", *SMALL, "--bandwidth", "0"))
    assert found["bandwidth"]["detail"] == "not checked with --bandwidth 0"


async def examined(
    store: ObjectStore,
    wall_s: float = 0.0,
    *,
    bucket: str = "bkt",
    bandwidth_bytes: int = 1000,
    read_only: bool = False,
    **settings: Any,
) -> dict[str, Finding]:
    """Findings by check."""
    examination = BucketExamination(
        store,
        Config(bucket=bucket, **settings),
        "s3kv/doctor/1",
        bandwidth_bytes=bandwidth_bytes,
        clock_s=lambda: 0.0,
        wall_s=lambda: wall_s,
    )
    return {finding.check: finding for finding in await examination.run(read_only=read_only)}


@pytest.mark.parametrize(
    ("ahead_s", "status", "said"),
    [
        (0.0, "ok", "within 60 s"),
        (-59.0, "ok", "within 60 s"),
        (120.0, "warning", "119 s ahead of"),
        (-120.0, "warning", "120 s behind"),
    ],
)
async def test_clocks_that_differ(ahead_s: float, status: str, said: str) -> None:
    found = await examined(MemoryStore(clock=lambda: 1e9), 1e9 + ahead_s)
    assert found["clock"].status == status
    assert said in found["clock"].detail


def test_the_copy_that_refreshes_is_tried_where_it_is_asked_for(run: Run, boto: Any) -> None:
    for bound in ("refresh_after_s=86400", "bucket_bytes=1TiB", "bucket_idle_s=1209600"):
        assert findings(run("doctor", *SMALL, "--set", bound))["refresh"]["status"] == "ok"
    assert "refresh" not in findings(run("doctor", *SMALL))
    assert left(boto) == set()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (StoreDenied("no", code="AccessDenied"), "allow s3:PutObject and s3:GetObject on"),
        (StoreError("no", code="NotImplemented"), "set refresh_after_s to 0"),
    ],
)
async def test_a_store_that_copies_nothing(error: StoreError, remedy: str) -> None:
    found = await examined(Refusing("refresh", error), refresh_after_s=86_400.0)
    assert found["refresh"].status == "warning"
    assert remedy in found["refresh"].remedy
    mrap = "arn:aws:s3::123456789012:accesspoint/mfzwi23gn.mrap"
    found = await examined(Refusing("refresh", error), bucket=mrap, refresh_after_s=86_400.0)
    assert "refresh" not in found, "S3 makes no copy from there"


@pytest.mark.parametrize(
    ("changes", "check", "status"),
    [({"if_absent": False}, "conditional put", "warning"), ({"zeros": True}, "get", "fault")],
    ids=["ignores conditions", "changes bytes"],
)
async def test_a_server_that_does_not_do_what_it_is_told(
    changes: dict[str, bool], check: str, status: str
) -> None:
    class Odd(MemoryStore):
        async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
            written = Place.of(bytes(place.nbytes)) if "zeros" in changes else place
            if_absent = changes.get("if_absent", if_absent)
            return await super().put(key, written, if_absent=if_absent)

    found = await examined(Odd(clock=lambda: 0.0))
    assert found[check].status == status
    assert (found["latency"].status == "skipped") == (check == "get")


DENIED = StoreDenied("denied: s3:DeleteObject")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"bucket_bytes": 2**30}, "cannot enforce bucket_bytes"),
        ({"bucket_idle_s": 60.0}, "cannot enforce bucket_idle_s"),
        (
            {"bucket_bytes": 2**30, "bucket_idle_s": 60.0},
            "cannot enforce bucket_bytes and bucket_idle_s",
        ),
    ],
)
async def test_a_bound_nobody_can_keep_is_named(settings: dict[str, Any], said: str | None) -> None:
    delete = (await examined(Refusing("delete", DENIED), **settings))["delete"]
    assert delete.status == "warning"
    assert "s3:DeleteObject" in delete.remedy
    if said is None:
        assert "keep" not in delete.detail
        assert "s3kv gc" in delete.remedy
    else:
        assert said in delete.detail
        assert "another engine" in delete.remedy


async def test_an_object_that_cannot_be_deleted_after_all_is_named() -> None:
    found = await examined(Refusing("delete", StoreUnavailable("gone to lunch"), "-large"))
    assert found["bandwidth"].status == "warning"
    assert "s3kv/doctor/1-large is left behind" in found["bandwidth"].detail


@pytest.mark.parametrize("at", ["put", "get_into", "head", "put of the large object"])
async def test_ctrl_c_leaves_nothing(at: str) -> None:
    def interrupt(verb: str, key: str) -> None:
        if at == (f"{verb} of the large object" if key.endswith("-large") else verb):
            examining.cancel()

    store = Persistent(interrupt)
    examining = asyncio.ensure_future(examined(store))
    with pytest.raises(asyncio.CancelledError):
        await examining
    await asyncio.sleep(0.1)
    assert [info async for info in store.list("")] == []


async def test_ctrl_c_during_a_put_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(MemoryStore):
        began = asyncio.Event()

        async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
            self.began.set()
            await asyncio.sleep(0.01)
            raise StoreUnavailable("gone to lunch")

    store = Failing(clock=lambda: 0.0)
    examining = asyncio.ensure_future(examined(store))
    await store.began.wait()
    examining.cancel()
    await asyncio.wait([examining])
    assert examining.cancelled()
    del examining
    gc.collect()  # asyncio tells of an error that nobody has asked for when it frees the task
    assert caplog.text == ""


async def test_a_refused_action_is_named_with_the_partition_of_the_region() -> None:
    for region, bucket, allowed in (
        ("us-gov-west-1", "bkt", "s3:ListBucket on arn:aws-us-gov:s3:::bkt"),
        ("us-east-1", "bkt--use1-az4--x-s3", "s3express:CreateSession on arn:aws:s3express:"),
        ("cn-north-1", "bkt--cnn1-az4--x-s3", "s3express:CreateSession on arn:aws-cn:s3express:"),
    ):
        store = Refusing("check", StoreDenied("no session", code="AccessDenied"))
        store.traffic.region = region
        found = await examined(store, bucket=bucket, read_only=True)
        assert f"allow {allowed}" in found["list"].remedy


def test_the_client_and_why(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = findings(run("doctor", "--read-only", *SMALL))["client"]
    assert fast["status"] == "ok"
    assert fast["detail"].startswith("fast, because no setting needs another; requests go to")
    wanted = findings(run("doctor", "--read-only", *SMALL, "--set", "client=aiobotocore"))["client"]
    assert wanted["status"] == "ok"
    assert "because client is 'aiobotocore'" in wanted["detail"]
    with monkeypatch.context() as proxied_host:
        proxied_host.setenv("HTTP_PROXY", "http://u:secret@127.0.0.1:1")
        for name in ("NO_PROXY", "no_proxy"):
            proxied_host.delenv(name, raising=False)
        result = run("doctor", "--read-only", *SMALL)
        refused = run("doctor", "--read-only", *SMALL, "--set", "client=fast")
    proxied = findings(result)
    assert proxied["client"]["status"] == "warning"
    assert "because the environment names the proxy" in proxied["client"]["detail"]
    assert "NO_PROXY" in proxied["client"]["remedy"]
    assert "HTTPS_PROXY" in proxied["list"]["remedy"]
    assert "secret" not in result.output
    assert refused.exit_code == 2
    assert "client is 'fast', and the environment names the proxy" in refused.stderr
