"""Servers that every part of the suite may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.rgw import Gateway, missing_programs, rgw_server


@pytest.fixture(scope="session")
def rgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A Ceph object gateway; one for the session. Mark the tests that use it `infra`.

    Without Ceph's packages the tests are skipped, on CI they fail.
    """
    missing = missing_programs()
    if missing:
        reason = f"not installed: {', '.join(missing)} (packages: see tests/rgw.py)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with rgw_server(tmp_path_factory.mktemp("rgw")) as gateway:
        yield gateway
