"""Each fault of a bucket, planted on moto and on real servers, is named, with a remedy.

Real servers refuse by themselves: unknown keys, wrong secrets, a clock that is wrong,
what a bucket policy denies. moto refuses nothing, and the regions of all are empty words; there
the proxy in between gives S3's own answer.
"""

from __future__ import annotations

import datetime
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import botocore.auth
import pytest
from click.testing import CliRunner, Result

from lab.faults import Fault, s3_error
from lab.proxy import Proxy, proxy
from s3kv.cli.app import cli
from s3kv.stores.s3.s3_store import S3Store
from tests import servers
from tests.servers import REAL_SERVERS
from tests.unit.cli.conftest import left
from tests.unit.cli.doctor.conftest import CHECKS, SMALL, findings, statuses

pytestmark = pytest.mark.usefixtures("no_torch")
BUCKET = "s3kv-doctor"
BUCKET_ARN = f"arn:aws:s3:::{BUCKET}"
OBJECTS_ARN = f"{BUCKET_ARN}/s3kv/*"


@dataclass
class Ground:
    """A server with an empty bucket behind a proxy. arguments: doctor's, but for the bucket."""

    is_real: bool
    between: Proxy
    boto: Any
    monkeypatch: pytest.MonkeyPatch
    arguments: list[str] = field(default_factory=list)
    bucket: str = BUCKET

    def doctor(self) -> Result:
        where = ["--bucket", self.bucket, "--endpoint-url", self.between.url]
        command = ["doctor", *SMALL, *where, *self.arguments]
        return CliRunner().invoke(cli, command, catch_exceptions=False)


@pytest.fixture(params=["moto", *REAL_SERVERS])
def ground(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    with servers.fresh_bucket(request.param, BUCKET, request, monkeypatch) as (url, boto):
        with proxy(url) as between:
            yield Ground(request.param != "moto", between, boto, monkeypatch)
        monkeypatch.undo()  # the right clock


def forbidden_by(policy: str, **options: Any) -> Callable[[Ground], None]:
    """A policy of the bucket; before a server that knows none, answers with these options."""

    def plant(ground: Ground) -> None:
        if ground.is_real:
            ground.boto.put_bucket_policy(Bucket=BUCKET, Policy=policy)
        else:
            ground.between.fault(s3_error(403, "AccessDenied", **options))

    return plant


def denied(verb: str, action: str, arn: str) -> Callable[[Ground], None]:
    statement = {"Effect": "Deny", "Principal": "*", "Action": action, "Resource": arn}
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    return forbidden_by(json.dumps(policy), verbs=(verb,))


def answered(status: int, code: str, **options: Any) -> Callable[[Ground], None]:
    return lambda ground: ground.between.fault(s3_error(status, code, **options))


def no_bucket(ground: Ground) -> None:
    ground.bucket = "no-such-bucket"


def no_credentials(ground: Ground) -> None:
    servers.forget_credentials(ground.monkeypatch)


def unknown_key(ground: Ground) -> None:
    ground.monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    if not ground.is_real:
        ground.between.fault(s3_error(403, "InvalidAccessKeyId"))


def wrong_secret(ground: Ground) -> None:
    ground.monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
    if not ground.is_real:
        ground.between.fault(s3_error(403, "SignatureDoesNotMatch"))


def wrong_clock(ground: Ground) -> None:
    real = botocore.auth.get_current_datetime
    hour = datetime.timedelta(hours=1)
    ground.monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: real() + hour)
    if not ground.is_real:
        ground.between.fault(s3_error(403, "RequestTimeTooSkewed"))


def path_style_only(ground: Ground) -> None:
    """A name that resolves, and does not with the bucket in front of it. Not an IP address:
    botocore puts no bucket in front of one."""
    resolve = socket.getaddrinfo

    def without_subdomains(host: Any, *arguments: Any, **options: Any) -> Any:
        if str(host).endswith(".localhost"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *arguments, **options)

    ground.monkeypatch.setattr(socket, "getaddrinfo", without_subdomains)
    url = ground.between.url.replace("127.0.0.1", "localhost")
    ground.arguments += ["--endpoint-url", url, "--set", "addressing_style=virtual"]


def nobody(ground: Ground) -> None:
    ground.between.fault(Fault(kind="refuse"))


def demands(name: str, value: str) -> Callable[[Ground], None]:
    """A policy that denies uploads without this header."""
    policy = servers.demanding(BUCKET, name, value)
    return forbidden_by(policy, verbs=("PUT",), lacks=f"{name}: {value}")


FAULTS: dict[str, tuple[Callable[[Ground], None], str]] = {
    "may not list": (
        denied("LIST", "s3:ListBucket", BUCKET_ARN),
        f"allow s3:ListBucket on {BUCKET_ARN} for",
    ),
    "may not put": (
        denied("PUT", "s3:PutObject", f"{BUCKET_ARN}/*"),
        f"allow s3:PutObject on {OBJECTS_ARN} for",
    ),
    "must encrypt": (
        demands("x-amz-server-side-encryption", "AES256"),
        "x-amz-server-side-encryption-aws-kms-key-id, set them in put_headers",
    ),
    "may not get": (
        denied("GET", "s3:GetObject", f"{BUCKET_ARN}/*"),
        f"allow s3:GetObject on {OBJECTS_ARN} for",
    ),
    "may not delete": (
        denied("DELETE", "s3:DeleteObject", f"{BUCKET_ARN}/*"),
        f"allow s3:DeleteObject on {OBJECTS_ARN}, for",
    ),
    "no bucket": (no_bucket, "create the bucket"),
    "no credentials": (no_credentials, "set AWS_ACCESS_KEY_ID and"),
    "unknown key": (unknown_key, "check AWS_ACCESS_KEY_ID"),
    "wrong secret": (wrong_secret, "check AWS_SECRET_ACCESS_KEY"),
    "wrong clock": (wrong_clock, "set this machine's clock"),
    "wrong region": (
        answered(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-west-1"}),
        "set region to 'eu-west-1'",
    ),
    "wrong region, not told": (answered(301, "PermanentRedirect"), "check region and endpoint_url"),
    "path style only": (path_style_only, "set addressing_style to 'path'"),
    "no conditional puts": (
        answered(501, "NotImplemented", verbs=("PUT",), times=1),
        "upgrade the server",
    ),
    "ill": (answered(503, "ServiceUnavailable"), "check endpoint_url and"),
    "nobody": (nobody, "check endpoint_url and the path to"),
    "no S3": (
        lambda ground: ground.between.fault(Fault(kind="answer", status=404, body="<html>")),
        "should name an S3 server",
    ),
}
CHECK = {"may not put": "put", "must encrypt": "put", "may not get": "get"} | {
    "may not delete": "delete",
    "no conditional puts": "conditional put",
}
"""The check that names it, if not that of the list, the first one."""
WARNINGS = {"may not delete", "no conditional puts"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(ground: Ground, name: str) -> None:
    (plant, remedy), check = FAULTS[name], CHECK.get(name, "list")
    status = "warning" if name in WARNINGS else "fault"
    plant(ground)
    result = ground.doctor()
    found, states = findings(result), statuses(result)
    assert remedy in found[check]["remedy"]
    assert states[check] == status
    assert set(states) == set(CHECKS)
    amiss = {name for name, state in states.items() if state in ("warning", "fault")}
    assert amiss == {check}
    assert result.exit_code == (1 if status == "fault" else 0), result.output


def test_what_is_left_without_permission_to_delete_is_named(ground: Ground) -> None:
    FAULTS["may not delete"][0](ground)
    detail = findings(ground.doctor())["delete"]["detail"]
    ground.between.lift()
    [key] = left(ground.boto, BUCKET)
    assert key in detail


def test_headers_that_are_set_are_sent(ground: Ground) -> None:
    FAULTS["must encrypt"][0](ground)
    ground.arguments += ["--set", 'put_headers={"x-amz-server-side-encryption": "AES256"}']
    assert statuses(ground.doctor()) == dict.fromkeys(CHECKS, "ok")


def test_a_bucket_that_keeps_versions_is_named_and_none_is_left(ground: Ground) -> None:
    keeping = {"Status": "Enabled"}
    ground.boto.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration=keeping)
    result = ground.doctor()
    found = findings(result)
    assert result.exit_code == 0
    assert found["versions"]["status"] == "warning"
    assert "deleted" in found["versions"]["detail"]
    assert "NoncurrentVersionExpiration" in found["versions"]["remedy"]
    assert "left" not in found["delete"]["detail"]
    told = ground.boto.list_object_versions(Bucket=BUCKET)
    assert not told.get("Versions")
    assert not told.get("DeleteMarkers")


def test_a_bucket_without_versions_is_not_warned_of(ground: Ground) -> None:
    assert "versions" not in findings(ground.doctor())


def test_versions_left_behind_are_named(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    async def erase(self: S3Store, key: str) -> bool:
        await self.delete(key)
        return False

    monkeypatch.setattr(S3Store, "erase", erase)
    found = findings(ground.doctor())
    assert "left behind" in found["delete"]["detail"]
    assert "s3:DeleteObjectVersion" in found["delete"]["detail"]
    assert "left behind" in found["bandwidth"]["detail"]
