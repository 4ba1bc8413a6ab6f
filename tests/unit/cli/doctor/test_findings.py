"""Remedies: one for every error of a store."""

from __future__ import annotations

import pytest

from s3kv.cli.doctor.findings import Finding, is_healthy, is_permission, remedy_for
from s3kv.errors import StoreDenied, StoreError, StoreMissing, StoreUnavailable


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (StoreDenied("no", code="AccessDenied"), "allow s3:GetObject on arn:x for these"),
        (StoreDenied("no"), "allow s3:GetObject on arn:x for these"),
        (StoreDenied("no", code="ExpiredToken"), "renew the credentials"),
        (StoreDenied("no", code="SomethingNew"), "check the credentials"),
        (StoreMissing("no", code="NoSuchBucket"), "create the bucket"),
        (StoreMissing("no"), "check region and endpoint_url"),
        (StoreError("no", region="eu-west-1"), "set region to 'eu-west-1'"),
        (StoreUnavailable("no"), "check endpoint_url and the path to the store"),
        (StoreUnavailable("no", code="unresolved"), "no such host"),
        (StoreError("no", code="botocore"), "check AWS_PROFILE"),
        (StoreError("no"), "it should name an S3 server"),
    ],
)
def test_remedies(error: StoreError, remedy: str) -> None:
    assert remedy in remedy_for(error, "s3:GetObject", "arn:x")


def test_what_concerns_the_call_and_not_the_caller() -> None:
    assert is_permission(StoreDenied("no", code="AccessDenied"))
    assert not is_permission(StoreDenied("no", code="InvalidAccessKeyId"))
    assert not is_permission(StoreUnavailable("no"))
    assert not is_permission(None)


def test_a_warning_is_no_fault() -> None:
    assert is_healthy(
        [Finding("a", "ok", ""), Finding("b", "warning", ""), Finding("c", "skipped", "")]
    )
    assert not is_healthy([Finding("a", "ok", ""), Finding("b", "fault", "")])
