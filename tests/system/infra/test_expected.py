"""The expected documents and the lint of policies can fail, and say in words what differs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.system.infra.expected import all_differences, differences
from tests.system.infra.iam_lint import lint
from tests.system.infra.mistakes import mistakes
from tests.system.infra.terraform import Plan, Terraform, copy_module, read_plans, show_plans

TOLD = {
    "a move to Glacier": "eks: resources aws_s3_bucket_lifecycle_configuration.this rule 0"
    ' transition: is new: [{"days": 1, "storage_class": "GLACIER"}]',
    "ten years in Express": "express: resources aws_s3_bucket_lifecycle_configuration.this rule 0"
    " expiration 0 days: is 3650, expected 7",
    "a reader's role with the writer's policy attached": "eks: resources"
    ' aws_iam_role_policy_attachment.eks["canary"] policy_arn:'
    ' is "arn:aws:iam::111122223333:policy/writer",'
    ' expected "arn:aws:iam::111122223333:policy/reader"',
    "all of S3 for every role": 'eks: resources aws_iam_role_policy_attachment.s3["canary"]:'
    ' is new: {"known after apply": ["id"],'
    ' "policy_arn": "arn:aws:iam::aws:policy/AmazonS3FullAccess", "role": "cache-canary"}',
    "an alarm that is switched off": "eks: resources"
    " aws_cloudwatch_metric_alarm.errors[0] actions_enabled: is false, expected true",
    "an alarm on another filter": "eks: resources"
    ' aws_cloudwatch_metric_alarm.latency[0] dimensions FilterId: is "reads",'
    ' expected "EntireBucket"',
}
"""Mistakes, all made in one copy of the module, and what is said of each."""


def test_six_mistakes_are_each_told(terraform: Terraform, tmp_path: Path) -> None:
    module = copy_module(tmp_path / "module")
    for mistake in mistakes():
        if mistake.name in TOLD:
            for change in mistake.changes:
                change.make(module)
    terraform.init(module)
    done = terraform.run(module, *show_plans("eks", "express"))
    told = [line for plan in read_plans(done.output) for line in differences(plan.run, plan)]
    assert set(TOLD.values()) - set(told) == set(), "\n".join(told)


def test_a_plan_that_is_missing_or_unknown_is_told(plans: dict[str, Plan]) -> None:
    others = [plan for run, plan in plans.items() if run != "bare"]
    others.append(dataclasses.replace(plans["bare"], run="barer"))
    assert all_differences(others) == [
        "bare: is expected, and was not planned",
        "barer: has no document",
    ]


def test_an_attribute_that_is_gone_is_told(plans: dict[str, Plan]) -> None:
    bucket = dict(plans["bare"].resources["aws_s3_bucket.this[0]"], tags=None)
    changed = dataclasses.replace(
        plans["bare"],
        resources=dict(plans["bare"].resources) | {"aws_s3_bucket.this[0]": bucket},
        outputs=dict(plans["bare"].outputs) | {"more": 1},
    )
    assert differences("bare", changed) == [
        "bare: outputs more: is new: 1",
        "bare: resources aws_s3_bucket.this[0] tags: is gone, expected"
        ' {"Application": "s3kv", "DataClass": "recomputable-cache", "ManagedBy": "terraform"}',
    ]


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
