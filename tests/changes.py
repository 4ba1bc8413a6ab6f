"""Tests that run for the changes that touch their subject, and nightly: `PARTS`.

A change is compared with the commit at which it left main. On main itself the commits of the last
12 hours are the change, because they are pushed together. Where git cannot tell, everything counts
as touched.
"""

from __future__ import annotations

import subprocess
from fnmatch import fnmatch

from tests.project import ROOT

_BUILD = ("pyproject.toml", "Makefile", ".ci/*", "tests/conftest.py", "tests/changes.py")
PARTS: dict[str, tuple[str, ...]] = {
    "tests/system/deploy": (
        *("deploy/*", "terraform/*", "docs/operating.md", "docs/stores.md", "scripts/*"),
        *("s3kv/config.py", "s3kv/metrics.py", "s3kv/prices.py", "s3kv/cli/*", "vllm_s3kv.py"),
        "lab/prometheus.py",
    ),
    "tests/system/infra": ("terraform/*", "deploy/*", "scripts/*", "lab/s3.py"),
    "tests/system/site": ("docs/*", "mkdocs.yml", "*.md", "scripts/*"),
    "tests/repository/test_installation.py": ("README.md", "docs/*", "s3kv/cli/*", "vllm_s3kv.py"),
    "tests/benchmarks/test_expiry.py": (
        *("benchmarks/*", "s3kv/host/*", "s3kv/planning/*", "s3kv/upkeep/*", "s3kv/prices.py"),
    ),
    "tests/scripts/gpu/test_commands.py": (
        *("scripts/gpu/*", "scripts/install_engine.sh", "s3kv/device/*", "benchmarks/gpu*"),
        *("tests/gpu/*", "tests/unit/device/*"),
    ),
    "tests/repository/test_packaging.py": ("README.md", "scripts/index_page.py", "vllm_s3kv.py"),
}
"""The tests, a folder or a file, and the paths of their subject beside themselves and `_BUILD`.
`*` is any text, with slashes in it, too."""
PUSHED_TOGETHER_S = 12 * 3600


def untouched() -> list[str]:
    """The parts that the working tree leaves as they were."""
    changed = _changed()
    if changed is None:
        return []
    return [
        part
        for part, subject in PARTS.items()
        if not any(fnmatch(path, of) for path in changed for of in (*subject, *_BUILD, part + "*"))
    ]


def _changed() -> set[str] | None:
    """The paths that differ from the base, new files among them; None if there is no base."""
    head = _git("rev-parse", "HEAD")
    bases = [_git("merge-base", "HEAD", main) for main in ("origin/main", "main")]
    base = next((base for base in bases if base not in (None, head)), None)
    oldest_s = _committed_s(head) - PUSHED_TOGETHER_S
    base = base or _git("rev-list", "-1", f"--min-age={oldest_s}", "HEAD")
    differing = base and _git("diff", "--name-only", "--no-renames", base)
    new = _git("ls-files", "--others", "--exclude-standard")
    if not base or differing is None or new is None:
        return None
    return set(differing.splitlines()) | set(new.splitlines())


def _committed_s(commit: str | None) -> int:
    return int(_git("show", "--no-patch", "--format=%ct", commit or "HEAD") or 0)


def _git(*arguments: str) -> str | None:
    """What git prints; None if it fails, or if the project is no checkout of its own."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
