"""The boundaries between the parts hold, and the contracts that say so can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()"]

FORBIDDEN = {
    "planning/new.py": "import time, vllm, torch, numpy\nimport s3kv.worker.rank\n",
    "library/pump.py": "import s3kv.library.tiered_store\n",
    "io/client.py": "import s3kv.io.server.service\n",
    "io/sources/bucket.py": "import s3kv.io.sources.other_shards\n",
    "objects/keys.py": "import s3kv.objects.codec\nimport s3kv.stores.store\n",
    "prove/judge.py": "import s3kv.prove.arms\n",
    "stores/http/pool.py": "import s3kv.stores.s3.answers\n",
}
"""Imports that break every contract, by the file they are added to."""


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [*LINT, "--no-cache"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


def test_contracts_can_fail(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "s3kv", tmp_path / "s3kv")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, imported in FORBIDDEN.items():
        path = tmp_path / "s3kv" / module
        path.write_text((path.read_text() if path.exists() else "") + "\n" + imported)
    done = lint(tmp_path)
    assert done.returncode == 1
    assert "0 kept, 11 broken" in done.stdout
