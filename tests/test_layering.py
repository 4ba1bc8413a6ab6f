"""The boundaries between the parts hold, and the contracts that say so can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()"]


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [*LINT, "--no-cache"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


def test_contracts_can_fail(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "s3kv", tmp_path / "s3kv")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "s3kv" / "planning" / "new.py").write_text(
        "import time\nimport vllm\nimport torch\nimport numpy\nimport s3kv.worker\n"
    )
    done = lint(tmp_path)
    assert done.returncode == 1
    assert "0 kept, 5 broken" in done.stdout
