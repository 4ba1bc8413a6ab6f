"""Whom the bucket's policy refuses: its denials, evaluated as AWS evaluates them, for requests that
have to pass and requests that must not. The simulated AWS evaluates no conditions."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any

import pytest

from tests.system.infra.iam_lint import listed
from tests.system.infra.terraform import Plan

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
        ("kms", TLS | {SSE: "aws:kms"}, set()),
        ("kms", TLS | {SSE: "aws:kms", KEY_ID: KEY}, set()),
        ("kms", TLS | {SSE: "AES256"}, {"DenyWrongEncryption"}),
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
