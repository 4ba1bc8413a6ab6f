"""The module applied to a simulated AWS, and s3kv as the client of what it made."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from lab.s3 import REGION, moto_process
from s3kv.config import Config
from s3kv.errors import StoreDenied
from s3kv.place import Place
from s3kv.stores.s3.kms import decrypted
from s3kv.stores.s3.s3_store import open_store
from s3kv.stores.store import ObjectStore
from tests.repository.test_commands import shown
from tests.servers import set_credentials
from tests.system.infra.applied import NAME, PREFIX, PROVIDER, WITHOUT_LIFECYCLE, Applied, applied
from tests.system.infra.terraform import Terraform, copy_module

KEY = f"{PREFIX}/v3/chunk"
ELSEWHERE = "team/other/chunk"


@pytest.fixture(scope="module")
def bucket(cloud: Applied) -> Applied:
    """The applied bucket, usable under the simulation."""
    cloud.aws("s3").delete_bucket_policy(Bucket=NAME)
    return cloud


def store(cloud: Applied, output: str = "kv_transfer_config") -> ObjectStore:
    """s3kv's client, with the settings that the module prints, and the simulation's address."""
    settings = json.loads(cloud.outputs[output])["kv_connector_extra_config"]
    return open_store(Config.parse({**settings, "endpoint_url": cloud.server.url}))


@pytest.fixture
def acting(bucket: Applied, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The client of somebody who has one policy, while policies are enforced."""

    @asynccontextmanager
    async def client(who: str, output: str = "kv_transfer_config") -> AsyncIterator[ObjectStore]:
        set_credentials(monkeypatch, bucket.user(bucket.outputs[f"{who}_policy_arn"]))
        made = store(bucket, output)
        with bucket.policies_enforced():
            yield made
        await made.close()

    return client


def test_a_second_plan_changes_nothing(cloud: Applied) -> None:
    again = cloud.command("plan", "-detailed-exitcode", "-input=false")
    assert again.code == 0, again.output


@pytest.mark.long
def test_the_commands_of_the_readme_end_with_settings_for_vllm(
    terraform: Terraform, tmp_path: Path
) -> None:
    """As they stand there, answered with "yes". The simulation is not AWS, so a file beside the
    example's says where it is; without lifecycle rules, for which the provider waits a minute."""
    commands = "\n".join(
        command.partition("  #")[0]
        for command in shown("README.md")
        if command.startswith(("cd terraform", "terraform "))
    )
    module = copy_module(tmp_path / "terraform")
    (module / "left_out_override.tf").write_text(WITHOUT_LIFECYCLE)
    override = module / "examples" / "minimal" / "provider_override.tf"
    with moto_process() as server:
        override.write_text(PROVIDER.format(region=REGION, url=server.url))
        done = terraform.shell(tmp_path, commands, answer="yes\n")
        assert done.code == 0, done.output
        transfer = json.loads(done.output.splitlines()[-1])
        config = Config.parse(transfer["kv_connector_extra_config"])
        buckets = server.client().list_buckets()["Buckets"]
    assert [bucket["Name"] for bucket in buckets] == [config.bucket]


def test_the_account_has_what_was_planned(cloud: Applied) -> None:
    s3 = cloud.aws("s3")
    rule = s3.get_bucket_encryption(Bucket=NAME)["ServerSideEncryptionConfiguration"]["Rules"][0]
    assert rule["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}
    block = s3.get_public_access_block(Bucket=NAME)["PublicAccessBlockConfiguration"]
    assert set(block.values()) == {True}
    alarms = {alarm["AlarmName"] for alarm in _alarms(cloud)}
    assert alarms == {f"{NAME}-{what}" for what in ("errors", "latency", "size")}
    role = cloud.aws("iam").list_attached_role_policies(RoleName=f"{NAME}-engine")
    assert [p["PolicyName"] for p in role["AttachedPolicies"]] == [f"{NAME}-writer"]


def _alarms(cloud: Applied) -> list[dict[str, Any]]:
    return list(cloud.aws("cloudwatch").describe_alarms()["MetricAlarms"])


async def test_a_writer_can_do_what_s3kv_does(acting: Any) -> None:
    async with acting("writer") as client:
        await _use(client)


async def _use(client: ObjectStore) -> None:
    """Everything s3kv asks of a bucket."""
    key = f"{PREFIX}/v3/{uuid.uuid4()}"
    buffer = memoryview(bytearray(10))
    await client.check()
    assert await client.get_into(key, Place.of(buffer)) is None, "what is not there is a miss"
    assert await client.head(key) is None
    assert await client.put(key, Place.of(b"chunk"), if_absent=True)
    assert not await client.put(key, Place.of(b"other"), if_absent=True)
    assert (await client.get_into(key, Place.of(buffer))).nbytes == 5
    assert bytes(buffer[:5]) == b"chunk"
    assert await client.refresh(key, 2e9)
    assert key in [info.key async for info in client.list(f"{PREFIX}/v3/")]
    with pytest.raises(StoreDenied, match="s3:DeleteObject"):
        await client.delete(key)


async def test_a_cleaner_can_delete_as_well(acting: Any) -> None:
    key, buffer = f"{PREFIX}/v3/kept", memoryview(bytearray(10))
    async with acting("cleaner") as client:
        await client.check()
        assert await client.put(key, Place.of(b"chunk"), if_absent=True)
        assert await client.delete(key)
        assert await client.get_into(key, Place.of(buffer)) is None


@pytest.mark.parametrize("who", ["writer", "cleaner"])
async def test_nobody_leaves_the_prefix(bucket: Applied, acting: Any, who: str) -> None:
    bucket.aws("s3").put_object(Bucket=NAME, Key=ELSEWHERE, Body=b"not ours")
    async with acting(who) as client:
        with pytest.raises(StoreDenied, match="s3:PutObject"):
            await client.put(ELSEWHERE, Place.of(b"x"), if_absent=False)
        with pytest.raises(StoreDenied, match="s3:GetObject"):
            await client.get_into(ELSEWHERE, Place.of(bytearray(10)))
        with pytest.raises(StoreDenied, match="s3:DeleteObject"):
            await client.delete(ELSEWHERE)
    assert bucket.aws("s3").get_object(Bucket=NAME, Key=ELSEWHERE)["Body"].read() == b"not ours"


async def test_a_reader_reads_and_changes_nothing(bucket: Applied, acting: Any) -> None:
    bucket.aws("s3").put_object(Bucket=NAME, Key=KEY, Body=b"chunk")
    buffer = memoryview(bytearray(10))
    async with acting("reader", "reader_kv_transfer_config") as client:
        await client.check()
        assert (await client.get_into(KEY, Place.of(buffer))).nbytes == 5
        assert await client.get_into(f"{PREFIX}/v3/none", Place.of(buffer)) is None
        assert await client.head(f"{PREFIX}/v3/none") is None
        with pytest.raises(StoreDenied, match="s3:PutObject"):
            await client.put(f"{PREFIX}/v3/new", Place.of(b"x"), if_absent=True)
        with pytest.raises(StoreDenied, match="s3:PutObject"):
            await client.refresh(KEY, 2e9)
        with pytest.raises(StoreDenied, match="s3:DeleteObject"):
            await client.delete(KEY)
    assert bucket.aws("s3").get_object(Bucket=NAME, Key=KEY)["Body"].read() == b"chunk"


def test_nobody_but_the_administrator_touches_the_bucket_itself(bucket: Applied) -> None:
    for policy in ("reader_policy_arn", "writer_policy_arn", "cleaner_policy_arn"):
        s3 = bucket.aws("s3", bucket.user(bucket.outputs[policy]))
        with bucket.policies_enforced():
            for forbidden in (s3.delete_bucket, s3.delete_bucket_policy, s3.get_bucket_acl):
                with pytest.raises(ClientError, match="AccessDenied"):
                    forbidden(Bucket=NAME)
    assert bucket.aws("s3").head_bucket(Bucket=NAME)


async def test_an_engine_decrypts_a_data_key_of_the_alias(
    bucket: Applied, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the simulation's administrator: it does not enforce policies on keys."""
    kms, url = bucket.aws("kms"), bucket.server.url
    alias = bucket.outputs["encryption_key_alias"]
    made = kms.generate_data_key_without_plaintext(KeyId=alias, KeySpec="AES_256")
    assert kms.describe_key(KeyId=alias)["KeyMetadata"]["Arn"] == made["KeyId"]
    assert made["KeyId"] == bucket.outputs["encryption_key_arn"]
    set_credentials(monkeypatch, {**bucket.server.env, "AWS_ENDPOINT_URL_KMS": url})
    transfer = json.loads(bucket.outputs["kv_transfer_config"])
    config = Config.parse(transfer["kv_connector_extra_config"])
    assert len(await decrypted(config, made["CiphertextBlob"])) == 32


async def test_a_pod_gets_the_writers_role_by_its_token(
    bucket: Applied, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on EKS: a token in a file and the role in the environment, the rest by botocore."""
    token = tmp_path / "token"
    token.write_text("the cluster's word for who this pod is")
    where = {"AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ENDPOINT_URL_STS": bucket.server.url}
    where["AWS_ROLE_ARN"] = bucket.outputs["role_arns"]["irsa-writer"]
    set_credentials(monkeypatch, where)
    client = store(bucket)
    await client.check()  # takes the role; the simulation cannot do that while it enforces
    with bucket.policies_enforced():
        await _use(client)
    await client.close()


@pytest.mark.nightly
def test_lifecycle_rules_and_the_way_back(terraform: Terraform, tmp_path: Path) -> None:
    """Everything applied, lifecycle rules included, used, and destroyed with what is in it."""
    with applied(terraform, tmp_path, destroyable=True) as cloud:
        again = cloud.command("plan", "-detailed-exitcode", "-input=false")
        assert again.code == 0, again.output
        s3 = cloud.aws("s3")
        rules = s3.get_bucket_lifecycle_configuration(Bucket=NAME)["Rules"]
        assert [(r["ID"], r["Status"], r["Filter"], r.get("Expiration")) for r in rules] == [
            ("expire", "Enabled", {"Prefix": f"{PREFIX}/"}, {"Days": 7}),
            ("abort-multipart", "Enabled", {"Prefix": ""}, None),
        ]
        assert rules[1]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
        s3.delete_bucket_policy(Bucket=NAME)
        s3.put_object(Bucket=NAME, Key=KEY, Body=b"chunk")
        destroyed = cloud.command("destroy", "-auto-approve", "-input=false")
        assert destroyed.code == 0, destroyed.output
        assert s3.list_buckets()["Buckets"] == []
        assert cloud.aws("iam").list_policies(Scope="Local")["Policies"] == []
        assert cloud.aws("iam").list_roles()["Roles"] == []
        assert _alarms(cloud) == []
