"""The examples of the README and of the library's page work as they stand there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from benchmarks.simulation.fleet import Setup
from s3kv.config import Config
from tests.project import ROOT
from tests.servers import KEYS, REGION, boto_client, moto_server, set_credentials

README = (ROOT / "README.md").read_text()
QUICK_START = (ROOT / "docs" / "quickstart.md").read_text()
LIBRARY = (ROOT / "docs" / "api.md").read_text().partition("<!-- BEGIN")[0]
EXAMPLES = re.findall(r"```python\n(.*?)```", LIBRARY, re.DOTALL)
MOST_LINES = 150


PRINTED = (
    ["Location(device=False, host=True, bucket=True)", "True 1.0"],
    ["computing", "0.25", "0.25"],
)
"""What the examples print, in the order they come."""


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_there_is_no_python_example_but_these() -> None:
    assert len(EXAMPLES) == len(PRINTED)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto_server() as url:
        boto_client(url, KEYS).create_bucket(Bucket="my-bucket")
        yield url


@pytest.mark.parametrize(("code", "printed"), list(zip(EXAMPLES, PRINTED, strict=False)))
def test_a_python_example_runs(
    code: str,
    printed: list[str],
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_credentials(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    exec(compile(code, "api.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == printed


def test_the_transfer_config_is_valid() -> None:
    (text,) = re.findall(r"--kv-transfer-config '(.*?)'", QUICK_START, re.DOTALL)
    transfer = json.loads(text)
    assert transfer["kv_connector"] == "S3KVConnector"
    config = Config.parse(transfer["kv_connector_extra_config"])
    example = (config.bucket_bytes / 2**30, config.host_bytes / 2**30)
    assert example == (Setup().bucket_gib, Setup().host_gib), "docs/cost.md bills the example"
