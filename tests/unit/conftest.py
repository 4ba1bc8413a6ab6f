"""The S3 server that tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    from tests.servers import moto_server  # boto3 is not there where tests run on a GPU

    with moto_server() as url:
        yield url
