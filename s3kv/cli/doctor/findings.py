"""What was looked at, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "fault", "skipped"]
"""warning: the cache works, with less. fault: it does not. skipped: could not be asked, because of
another finding or because it was not wanted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. remedy: what to do, empty when there is nothing to do."""

    check: str
    status: Status
    detail: str
    remedy: str = ""


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether there is no fault; warnings do not count."""
    return all(finding.status != "fault" for finding in findings)
