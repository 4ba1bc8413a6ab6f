"""The module by itself: its form, its own tests, its policies, what it prints for vLLM, and whom
its bucket's policy refuses, evaluated as AWS evaluates it: the simulated AWS does not."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.system.infra.checks import (
    format_check,
    policy_complaints,
    source_complaints,
    transfer_config,
    validate,
)
from tests.system.infra.expected import all_differences
from tests.system.infra.iam_lint import listed
from tests.system.infra.terraform import (
    MODULE,
    TEST_THE_REST,
    Plan,
    Result,
    Terraform,
    copy_module,
    read_complaints,
)


def test_the_files_are_formatted(terraform: Terraform) -> None:
    done = format_check(terraform, MODULE)
    assert done.code == 0, done.output


def test_the_module_and_every_example_are_valid(terraform: Terraform, tmp_path: Path) -> None:
    done = validate(terraform, copy_module(tmp_path / "module"))
    assert done.code == 0, done.output
    assert json.loads(done.output)["warning_count"] == 0, done.output


def test_the_plans_are_as_intended(planned: Result) -> None:
    assert planned.code == 0, read_complaints(planned.output)


def test_nothing_but_the_expected_is_planned(plans: dict[str, Plan]) -> None:
    told = all_differences(plans.values())
    advice = "was this intended? python -m tests.system.infra.expected, and read its diff"
    assert told == [], "\n".join([*told, advice])


def test_the_sources_hold_nothing_that_no_plan_shows() -> None:
    assert source_complaints(MODULE) == []


def test_wrong_input_is_refused_and_right_input_is_not(terraform: Terraform) -> None:
    done = terraform.run(terraform.module, *TEST_THE_REST)
    assert done.code == 0, read_complaints(done.output)


def test_every_policy_is_right_by_itself(plans: dict[str, Plan]) -> None:
    assert policy_complaints(plans.values()) == {}


@pytest.mark.parametrize("run", ["standard", "bare", "kms", "express"])
@pytest.mark.parametrize("cache", ["kv", "ec"])
def test_s3kv_reads_what_it_prints_for_vllm(plans: dict[str, Plan], run: str, cache: str) -> None:
    role, config = transfer_config(plans[run], cache)
    assert role == f"{cache}_both"
    assert config.bucket == ("cache--euw1-az1--x-s3" if run == "express" else "cache")
    assert config.prefix == ("team/s3kv" if run == "standard" else "s3kv")
    assert config.region == "eu-west-1"
    assert config.refresh_after_s == (0 if run == "express" else 7 * 86400 / 4)
    reader = dataclasses.replace(config, refresh_after_s=0.0)
    assert transfer_config(plans[run], cache, reader=True) == (f"{cache}_consumer", reader)


@pytest.mark.parametrize("cache", ["kv", "ec"])
def test_the_callers_settings_are_among_what_s3kv_reads(plans: dict[str, Plan], cache: str) -> None:
    """The run `kept` sets them; a number is still one and not text."""
    _, config = transfer_config(plans["kept"], cache)
    assert (config.bucket, config.prefix, config.region) == ("cache", "s3kv", "eu-west-1")
    assert (config.host_bytes, config.drain_timeout_s) == (32 * 2**30, 7.5)
    assert (config.refresh_after_s, config.bucket_idle_s) == (3600, 86400)
    assert config.bucket_bytes == 10 * 2**40
    assert config.verify_tls is False
    _, reader = transfer_config(plans["kept"], cache, reader=True)
    assert reader == dataclasses.replace(
        config, refresh_after_s=0.0, bucket_idle_s=0.0, bucket_bytes=0
    )


@pytest.mark.parametrize("cache", ["kv", "ec"])
def test_the_connector_it_names_is_there(plans: dict[str, Plan], cache: str) -> None:
    """Without vLLM: the class is looked up in the module's source, not imported."""
    transfer = json.loads(plans["bare"].outputs[f"{cache}_transfer_config"])
    spec = importlib.util.find_spec(transfer[f"{cache}_connector_module_path"])
    exported = {
        alias.name
        for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert transfer[f"{cache}_connector"] in exported


TLS = {"aws:SecureTransport": "true", "s3:TlsVersion": "1.3"}
SSE = "s3:x-amz-server-side-encryption"
KEY_ID = f"{SSE}-aws-kms-key-id"
CUSTOMER = f"{SSE}-customer-algorithm"
KEY = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
OTHER_KEY = KEY.replace("1111-2222", "9999-2222")


def denied_by(
    policy: dict[str, Any], action: str, context: dict[str, str], key: str = "any/key"
) -> set[str]:
    """The statements that refuse `action` on an object of the bucket "cache"."""
    arn = f"arn:aws:s3:::cache/{key}"
    return {
        statement["Sid"]
        for statement in policy["Statement"]
        if statement["Effect"] == "Deny"
        and any(fnmatchcase(action, pattern) for pattern in listed(statement["Action"]))
        and any(fnmatchcase(arn, pattern) for pattern in listed(statement["Resource"]))
        and all(
            _holds(operator, context.get(name), value)
            for operator, keys in statement["Condition"].items()
            for name, value in keys.items()
        )
    }


def _holds(operator: str, told: str | None, value: str) -> bool:
    """Whether a condition holds for what a request tells; None: it does not tell."""
    if operator == "Null":
        return (told is None) == (value == "true")
    if operator == "StringNotEquals":
        return told != value  # and so for a request that does not tell
    if told is None:
        return False
    if operator == "Bool":
        return told == value
    assert operator == "NumericLessThan", operator
    return float(told) < float(value)


@pytest.mark.parametrize(
    ("run", "context", "denied"),
    [
        ("standard", TLS, set()),
        ("standard", TLS | {SSE: "AES256"}, set()),
        ("standard", TLS | {SSE: "aws:kms"}, {"DenyWrongEncryption"}),
        ("standard", TLS | {SSE: "aws:kms:dsse"}, {"DenyWrongEncryption"}),
        ("standard", TLS | {CUSTOMER: "AES256"}, {"DenyCustomerKeys"}),
        ("kms", TLS, set()),
        ("kms", TLS | {SSE: "aws:kms"}, {"DenyKmsWithoutKey"}),
        ("kms", TLS | {SSE: "aws:kms", KEY_ID: KEY}, set()),
        ("kms", TLS | {SSE: "AES256"}, {"DenyWrongEncryption", "DenyKmsWithoutKey"}),
        ("kms", TLS | {SSE: "aws:kms", KEY_ID: OTHER_KEY}, {"DenyWrongKey"}),
        ("kms", TLS | {CUSTOMER: "AES256"}, {"DenyCustomerKeys"}),
        ("standard", TLS | {"s3:TlsVersion": "1.2"}, set()),
        ("standard", TLS | {"s3:TlsVersion": "1.1"}, {"DenyOldTls"}),
        ("standard", {"aws:SecureTransport": "false"}, {"DenyWithoutTls"}),
    ],
)
def test_an_upload_is_refused_for_what_it_names(
    plans: dict[str, Plan], run: str, context: dict[str, str], denied: set[str]
) -> None:
    policy = json.loads(plans[run].resources["aws_s3_bucket_policy.this"]["policy"])
    assert denied_by(policy, "s3:PutObject", context) == denied


@pytest.mark.parametrize("action", ["s3:GetObject", "s3:DeleteObject"])
def test_what_uploads_are_refused_for_bothers_no_other_request(
    plans: dict[str, Plan], action: str
) -> None:
    policy = json.loads(plans["kms"].resources["aws_s3_bucket_policy.this"]["policy"])
    assert denied_by(policy, action, TLS) == set()
    assert denied_by(policy, action, {"aws:SecureTransport": "false"}) == {"DenyWithoutTls"}
