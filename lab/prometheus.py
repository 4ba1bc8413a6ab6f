"""A real Prometheus of our own: `with prometheus({"job": "127.0.0.1:8000"}, home) as server: …`.

It scrapes every second, keeps what it learns in `home`, and ends with the block. The programs are
those of Debian's package prometheus.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.service import free_ports

PROGRAMS = ("prometheus", "promtool")
_START_S = 60.0


def missing_programs() -> list[str]:
    """What is needed and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class QueryFailed(Exception):
    """Prometheus did not take a query. Carries what it said of it."""


class Prometheus:
    """url: where it listens."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query, now. Raises `QueryFailed`."""
        return list(self.get("query", query=expr)["result"])

    def get(self, path: str, **parameters: object) -> Any:
        """The data of an answer of its HTTP interface. Raises `QueryFailed`."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise QueryFailed(error.read().decode()) from error


@contextmanager
def prometheus(
    targets: Mapping[str, str], home: Path, *, rules: Sequence[Path] = ()
) -> Iterator[Prometheus]:
    """targets: "host:port" of what is scraped, by the name of its job. home: an empty directory."""
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]}
            for job, target in targets.items()
        ],
    }
    # JSON is YAML.
    (home / "prometheus.yml").write_text(json.dumps(settings))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = ["prometheus", f"--config.file={home / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={home / 'data'}", f"--web.listen-address={address}"]
    with (home / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _wait_until_ready(process, f"http://{address}", home / "prometheus.log")
        yield Prometheus(f"http://{address}")
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=5):
            return
        time.sleep(0.1)
    raise QueryFailed(f"Prometheus did not start: {log.read_text()[-2_000:]}")
