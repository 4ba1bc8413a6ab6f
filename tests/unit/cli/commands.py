"""Every command of the command line once, on a bucket that holds one sound chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.servers import BUCKET
from tests.unit.cli.test_cost import METRICS
from tests.unit.cli.test_verify import key, put, sealed


def prepare(boto: Any, url: str, folder: Path) -> dict[str, list[str]]:
    """Fill the bucket, and return the arguments of each command by a name of its own."""
    put(boto, key(1), sealed(1))
    metrics = folder / "metrics.txt"
    metrics.write_text(METRICS)
    bucket = ["--bucket", BUCKET, "--endpoint-url", url]
    return {
        "config": ["config", *bucket],
        "cost": ["cost", "--metrics", str(metrics), "--over", "24h", "--stored", "1GiB"],
        "doctor": ["doctor", "--set", "host_bytes=1MiB", *bucket],
        "verify KEY": ["verify", key(1), *bucket],
        "ls": ["ls", *bucket],
        "ls --summary": ["ls", "--summary", *bucket],
        "serve": ["serve", str(folder), "--print", *bucket],
        "verify": ["verify", *bucket],
        "gc": ["gc", "--older-than", "1h", *bucket],  # nothing is that old
    }
