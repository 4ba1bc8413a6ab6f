"""What the tests of doctor read off its answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import Result

from s3kv.cli.doctor import host

CHECKS = ("list", "put", "conditional put", "get", "clock", "latency", "delete", "bandwidth")
"""Those of the bucket, in the order of `BucketExamination`."""
SMALL = ("--json", "--set", "host_bytes=1MiB", "--bandwidth", "1MiB")


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking torch takes seconds, and has its tests."""
    monkeypatch.setattr(host, "_look_for_gpu", lambda: "not looked at")


def findings(result: Result) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in json.loads(result.stdout)["findings"]}


def statuses(result: Result) -> dict[str, str]:
    """Of the checks of the bucket."""
    return {check: f["status"] for check, f in findings(result).items() if check in CHECKS}
