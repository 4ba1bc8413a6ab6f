"""The module applied to a simulated AWS, and s3kv as the client of what it made."""

from __future__ import annotations

import json
import uuid
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
from tests.servers import forget_credentials
from tests.system.infra.applied import NAME, PREFIX, PROVIDER, WITHOUT_LIFECYCLE, Applied, applied
from tests.system.infra.terraform import Terraform, copy_module

KEY = f"{PREFIX}/v3/chunk"
ELSEWHERE = "team/other/chunk"


@pytest.fixture(scope="module")
def bucket(cloud: Applied) -> Applied:
    """The applied bucket, usable under the simulation."""
    cloud.drop_bucket_policy()
    return cloud


def store(cloud: Applied, output: str = "kv_transfer_config") -> ObjectStore:
    """s3kv's client, with the settings that the module prints, and the simulation's address."""
    settings = json.loads(cloud.outputs[output])["kv_connector_extra_config"]
    return open_store(Config.parse({**settings, "endpoint_url": cloud.server.url}))


def become(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    forget_credentials(monkeypatch)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


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
    assert {alarm["AlarmName"] for alarm in _alarms(cloud)} == {
        f"{NAME}-errors",
        f"{NAME}-latency",
        f"{NAME}-size",
    }
    role = cloud.aws("iam").list_attached_role_policies(RoleName=f"{NAME}-engine")
    assert [p["PolicyName"] for p in role["AttachedPolicies"]] == [f"{NAME}-writer"]


def _alarms(cloud: Applied) -> list[dict[str, Any]]:
    return list(cloud.aws("cloudwatch").describe_alarms()["MetricAlarms"])


async def test_a_writer_can_do_what_s3kv_does(
    bucket: Applied, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, bucket.user(bucket.outputs["writer_policy_arn"]))
    client = store(bucket)
    with bucket.policies_enforced():
        await _use(client)
    await client.close()


async def _use(client: ObjectStore) -> None:
    """Everything s3kv asks of a bucket."""
    key = f"{PREFIX}/v3/{uuid.uuid4()}"
    buffer = memoryview(bytearray(10))
    await client.check()
    assert await client.get_into(key, Place.of(buffer)) is None, (
        "a key that is not there must be a miss"
    )
    assert await client.head(key) is None
    assert await client.put(key, Place.of(b"chunk"), if_absent=True)
    assert not await client.put(key, Place.of(b"other"), if_absent=True)
    assert (await client.get_into(key, Place.of(buffer))).nbytes == 5
    assert bytes(buffer[:5]) == b"chunk"
    assert await client.refresh(key, 2e9)
    assert key in [info.key async for info in client.list(f"{PREFIX}/v3/")]
    with pytest.raises(StoreDenied, match="s3:DeleteObject"):
        await client.delete(key)


async def test_a_cleaner_can_delete_as_well(
    bucket: Applied, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, bucket.user(bucket.outputs["cleaner_policy_arn"]))
    client = store(bucket)
    key, buffer = f"{PREFIX}/v3/kept", memoryview(bytearray(10))
    with bucket.policies_enforced():
        await client.check()
        assert await client.put(key, Place.of(b"chunk"), if_absent=True)
        assert await client.delete(key)
        assert await client.get_into(key, Place.of(buffer)) is None
    await client.close()


@pytest.mark.parametrize("who", ["writer", "cleaner"])
async def test_nobody_leaves_the_prefix(
    bucket: Applied, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    bucket.aws("s3").put_object(Bucket=NAME, Key=ELSEWHERE, Body=b"not ours")
    become(monkeypatch, bucket.user(bucket.outputs[f"{who}_policy_arn"]))
    client = store(bucket)
    with bucket.policies_enforced():
        with pytest.raises(StoreDenied, match="s3:PutObject"):
            await client.put(ELSEWHERE, Place.of(b"x"), if_absent=False)
        with pytest.raises(StoreDenied, match="s3:GetObject"):
            await client.get_into(ELSEWHERE, Place.of(bytearray(10)))
        with pytest.raises(StoreDenied, match="s3:DeleteObject"):
            await client.delete(ELSEWHERE)
    await client.close()
    assert bucket.aws("s3").get_object(Bucket=NAME, Key=ELSEWHERE)["Body"].read() == b"not ours"


async def test_a_reader_reads_and_changes_nothing(
    bucket: Applied, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.aws("s3").put_object(Bucket=NAME, Key=KEY, Body=b"chunk")
    become(monkeypatch, bucket.user(bucket.outputs["reader_policy_arn"]))
    client = store(bucket, "reader_kv_transfer_config")
    buffer = memoryview(bytearray(10))
    with bucket.policies_enforced():
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
    await client.close()
    assert bucket.aws("s3").get_object(Bucket=NAME, Key=KEY)["Body"].read() == b"chunk"


def test_nobody_but_the_administrator_touches_the_bucket_itself(bucket: Applied) -> None:
    import boto3

    for policy in ("reader_policy_arn", "writer_policy_arn", "cleaner_policy_arn"):
        keys = bucket.user(bucket.outputs[policy])
        s3 = boto3.client(
            "s3",
            endpoint_url=bucket.server.url,
            aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        )
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
    assert url is not None
    alias = bucket.outputs["encryption_key_alias"]
    made = kms.generate_data_key_without_plaintext(KeyId=alias, KeySpec="AES_256")
    assert kms.describe_key(KeyId=alias)["KeyMetadata"]["Arn"] == made["KeyId"]
    assert made["KeyId"] == bucket.outputs["encryption_key_arn"]
    become(monkeypatch, {**bucket.server.env, "AWS_ENDPOINT_URL_KMS": url})
    config = Config.parse(
        json.loads(bucket.outputs["kv_transfer_config"])["kv_connector_extra_config"]
    )
    assert len(await decrypted(config, made["CiphertextBlob"])) == 32


async def test_a_pod_gets_the_writers_role_by_its_token(
    bucket: Applied, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on EKS: a token in a file and the role in the environment, the rest by botocore."""
    token = tmp_path / "token"
    token.write_text("the cluster's word for who this pod is")
    assert bucket.server.url is not None
    become(
        monkeypatch,
        {
            "AWS_ROLE_ARN": bucket.outputs["role_arns"]["irsa-writer"],
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
            "AWS_ENDPOINT_URL_STS": bucket.server.url,
        },
    )
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
