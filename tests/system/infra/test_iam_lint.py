"""The lint finds what it says it finds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.infra.iam_lint import lint

BUCKET = "arn:aws:s3:::cache"
GOOD = {
    "Effect": "Allow",
    "Action": ["s3:GetObject", "s3:PutObject"],
    "Resource": f"{BUCKET}/s3kv/*",
}
LIST = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": BUCKET}


def complaints(**statement: Any) -> list[str]:
    return lint({"Version": "2012-10-17", "Statement": [statement]})


def test_nothing_is_found_in_a_good_policy() -> None:
    assert complaints(**GOOD) == []
    assert complaints(**LIST, Condition={"StringLikeIfExists": {"s3:prefix": "x"}}) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"Action": "s3:GetObjects"}, "s3:GetObjects does not exist"),
        ({"Action": "s4:GetObject"}, "s4:GetObject does not exist"),
        ({"Resource": BUCKET}, "s3:GetObject has no resource it could be allowed on"),
        ({"Action": "s3:ListBucket"}, "s3:ListBucket has no resource it could be allowed on"),
        ({"Resource": [f"{BUCKET}/*", BUCKET]}, f"no action can be on {BUCKET}"),
        ({"Condition": {"StringLik": {"s3:TlsVersion": "1"}}}, "StringLik is no operator"),
        (
            {"Condition": {"StringLike": {"s3:Prefix": "1"}}},
            "s3:Prefix is no condition of s3:GetObject or s3:PutObject",
        ),
        ({"Action": "s3:*"}, "allows s3:*"),
        ({"Principal": "*"}, "allows everybody"),
        ({"NotAction": "s3:GetObject"}, "has NotAction"),
    ],
)
def test_mistakes_are_found(change: dict[str, Any], complaint: str) -> None:
    assert f"statement: {complaint}" in complaints(**(GOOD | change))


def test_a_token_must_come_from_the_issuer_that_is_trusted() -> None:
    trust = {
        "Effect": "Allow",
        "Principal": {"Federated": "arn:aws:iam::1:oidc-provider/issuer/id"},
        "Action": "sts:AssumeRoleWithWebIdentity",
    }
    assert complaints(**trust, Condition={"StringEquals": {"issuer/id:sub": "x"}}) == []
    assert complaints(**trust, Condition={"StringEquals": {"other/id:sub": "x"}}) != []
