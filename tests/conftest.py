"""Servers that every part of the suite may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.rgw import Gateway, missing_programs, rgw_server


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests marked `nightly` to whoever names the mark, a test or its file."""
    named = any(".py" in argument for argument in config.invocation_params.args)
    if named or "nightly" in config.option.markexpr:
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if nightly:
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]


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
