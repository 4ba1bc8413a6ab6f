"""The expected documents can fail, and say in words what differs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.system.infra.expected import all_differences, differences
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
