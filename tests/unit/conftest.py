"""The S3 server that tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import moto_server


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    with moto_server() as url:
        yield url
