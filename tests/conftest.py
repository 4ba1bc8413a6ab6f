"""Servers that every part of the suite may ask for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.rgw import Gateway, missing_programs, rgw_server

ON_REQUEST = ("long", "nightly")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts us in the background has it ignored, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests with a mark of `ON_REQUEST` to whoever names the mark, or the test."""
    if any("::" in argument for argument in config.invocation_params.args):
        return
    unasked = [mark for mark in ON_REQUEST if mark not in config.option.markexpr]
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


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
