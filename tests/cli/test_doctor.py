"""`s3kv doctor` on a real client, with each fault planted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import Result

from lab.faults import Fault, s3_error
from lab.proxy import Proxy, proxy
from s3kv.cli.doctor import BucketExamination, Finding, examine_host
from s3kv.config import Config
from s3kv.objects.memory import MemoryStore
from tests import servers
from tests.cli.conftest import Run

CHECKS = ["list", "put", "conditional put", "get", "clock", "latency", "delete"]


@pytest.fixture
def between(url: str) -> Iterator[Proxy]:
    with proxy(url) as between:
        yield between


def findings(result: Result) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in json.loads(result.stdout)["findings"]}


def statuses(result: Result) -> dict[str, str]:
    return {check: f["status"] for check, f in findings(result).items() if check in CHECKS}


def left(boto: Any) -> list[str]:
    listing = boto.list_objects_v2(Bucket=servers.BUCKET)
    return [item["Key"] for item in listing.get("Contents", [])]


def test_all_is_well(run: Run, boto: Any) -> None:
    result = run("doctor", "--json", "--set", "host_bytes=1MiB")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["healthy"] is True
    assert statuses(result) == dict.fromkeys(CHECKS, "ok")
    assert left(boto) == []


def test_no_bucket(run: Run) -> None:
    result = run("doctor", "--json", bucket="no-such-bucket")
    assert result.exit_code == 1
    found = findings(result)
    assert "create the bucket" in found["list"]["remedy"]
    assert {found[check]["status"] for check in CHECKS[1:]} == {"skipped"}


def test_no_credentials(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    servers.forget_credentials(monkeypatch)
    result = run("doctor", "--json")
    assert result.exit_code == 1
    assert "set AWS_ACCESS_KEY_ID" in findings(result)["list"]["remedy"]


@pytest.mark.parametrize(
    ("verb", "check", "remedy"),
    [
        ("LIST", "list", f"allow s3:ListBucket on arn:aws:s3:::{servers.BUCKET} "),
        ("PUT", "put", f"allow s3:PutObject on arn:aws:s3:::{servers.BUCKET}/s3kv/* "),
        ("GET", "get", f"allow s3:GetObject on arn:aws:s3:::{servers.BUCKET}/s3kv/* "),
    ],
)
def test_a_permission_that_is_missing(
    run: Run, between: Proxy, boto: Any, verb: str, check: str, remedy: str
) -> None:
    between.fault(s3_error(403, "AccessDenied", verbs=(verb,)))
    result = run("doctor", "--json", at=between.url)
    assert result.exit_code == 1
    found = statuses(result)
    assert [name for name in CHECKS if found[name] == "fault"] == [check]
    assert findings(result)[check]["remedy"].startswith(remedy)
    assert left(boto) == []


def test_no_permission_to_delete_is_a_warning(run: Run, between: Proxy, boto: Any) -> None:
    between.fault(s3_error(403, "AccessDenied", verbs=("DELETE",)))
    result = run("doctor", "--json", "--set", "host_bytes=1MiB", at=between.url)
    assert result.exit_code == 0, result.output
    finding = findings(result)["delete"]
    assert finding["status"] == "warning"
    assert "s3:DeleteObject" in finding["remedy"]
    [key] = left(boto)
    assert key in finding["detail"]


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        (s3_error(403, "RequestTimeTooSkewed"), "this machine's clock is wrong: set it"),
        (s3_error(403, "InvalidAccessKeyId"), "look at the credentials"),
        (s3_error(403, "SignatureDoesNotMatch"), "the secret key does not belong"),
        (
            s3_error(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-west-1"}),
            "set region to 'eu-west-1'",
        ),
        (s3_error(503, "ServiceUnavailable"), "look at endpoint_url and at what is between"),
        (Fault(kind="refuse"), "look at endpoint_url and at what is between"),
    ],
    ids=["clock", "key", "secret", "region", "server", "nobody"],
)
def test_what_stops_everything(run: Run, between: Proxy, fault: Fault, remedy: str) -> None:
    between.fault(fault)
    result = run("doctor", "--json", at=between.url)
    assert result.exit_code == 1
    found = findings(result)
    assert found["list"]["status"] == "fault"
    told = f"{found['list']['detail']} {found['list']['remedy']}"
    assert remedy in told
    assert {found[check]["status"] for check in CHECKS[1:]} == {"skipped"}


def test_read_only_writes_nothing(run: Run, between: Proxy) -> None:
    between.fault(s3_error(403, "AccessDenied", verbs=("PUT", "DELETE")))
    result = run("doctor", "--json", "--read-only", "--set", "host_bytes=1MiB", at=between.url)
    assert result.exit_code == 0, result.output
    found = statuses(result)
    assert (found["list"], found["get"], found["put"]) == ("ok", "ok", "skipped")


def test_as_text(run: Run) -> None:
    result = run("doctor", bucket="no-such-bucket")
    assert result.exit_code == 1
    assert "→ create the bucket" in result.stdout


async def examined(store: MemoryStore, wall_s: float) -> dict[str, Finding]:
    config = Config(bucket="bkt")
    examination = BucketExamination(
        store, config, "s3kv/doctor/1", clock_s=lambda: 0.0, wall_s=lambda: wall_s
    )
    return {finding.check: finding for finding in await examination.run(read_only=False)}


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


async def test_a_server_that_ignores_conditions() -> None:
    class Ignorant(MemoryStore):
        async def put(self, key: str, data: memoryview, *, if_absent: bool) -> bool:
            return await super().put(key, data, if_absent=False)

    found = await examined(Ignorant(clock=lambda: 0.0), 0.0)
    assert found["conditional put"].status == "warning"


async def test_bytes_that_changed_on_the_way() -> None:
    class Changing(MemoryStore):
        async def put(self, key: str, data: memoryview, *, if_absent: bool) -> bool:
            return await super().put(key, memoryview(bytes(len(data))), if_absent=if_absent)

    found = await examined(Changing(clock=lambda: 0.0), 0.0)
    assert found["get"].status == "fault"
    assert found["latency"].status == "skipped"


@pytest.mark.parametrize(
    ("seed", "status"), [(None, "ok"), ("0", "ok"), ("random", "warning")], ids=str
)
def test_host(seed: str | None, status: str) -> None:
    config = Config(bucket="bkt", host_bytes=2**30)
    environment = {} if seed is None else {"PYTHONHASHSEED": seed}
    memory, hash_seed = examine_host(config, 2**30 - 1, environment)
    assert (memory.status, hash_seed.status) == ("fault", status)
    assert examine_host(config, 2**30, environment)[0].status == "ok"
