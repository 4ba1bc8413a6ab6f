"""Every mistake in `mistakes.txt` is noticed, and by the tool that is named there.

The tools are asked in this order, and the first that complains ends it:

    fmt        terraform fmt
    validate   terraform validate, of the module and the examples
    test       terraform test: the real provider plans, and the module's tests compare
    lint       iam_lint, on the policies in those plans
    parser     s3kv's own parser of its settings, on the outputs in those plans
    docs       the README's tables, and that every variable is described
    use        the module applied to a simulated AWS, and s3kv as its client

Takes a quarter of an hour on two cores; `pytest tests/infra/test_mistakes.py -k dashboard` runs
one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from s3kv.errors import ConfigError
from tests.infra.checks import format_check, policy_complaints, transfer_config, validate
from tests.infra.mistakes import Mistake, mistakes
from tests.infra.terraform import (
    MODULE_VARIABLE,
    TEST_AND_SHOW_PLANS,
    TEST_THE_REST,
    Plan,
    Terraform,
    copy_module,
    read_plans,
)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parent.parent.parent
MISTAKES = mistakes()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_the_mistake_is_noticed(terraform: Terraform, tmp_path: Path, mistake: Mistake) -> None:
    module = copy_module(tmp_path / "module")
    for change in mistake.changes:
        change.make(module)
    if mistake.caught_by != "fmt":  # the others are not to be noticed by a column out of line
        assert terraform.run(module, "fmt", "-recursive").code == 0
    assert first_to_notice(terraform, module) == mistake.caught_by


def test_nothing_is_noticed_where_there_is_no_mistake(terraform: Terraform, tmp_path: Path) -> None:
    assert first_to_notice(terraform, copy_module(tmp_path / "module")) is None


def test_there_are_enough_of_them() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 40


def first_to_notice(terraform: Terraform, module: Path) -> str | None:
    """The first tool that complains about `module`, a copy; None when all are content."""
    if format_check(terraform, module).code:
        return "fmt"
    if validate(terraform, module).code:
        return "validate"
    terraform.init(module)
    shown = terraform.run(module, *TEST_AND_SHOW_PLANS)
    if shown.code or terraform.run(module, *TEST_THE_REST).code:
        return "test"
    plans = list(read_plans(shown.output))
    tools: dict[str, Callable[[], bool]] = {
        "lint": lambda: policy_complaints(plans) != {},
        "parser": lambda: not _parses(plans),
        "docs": lambda: not _passes(module, "test_readme.py"),
        "use": lambda: not _passes(module, "test_applied.py"),
    }
    return next((name for name, complains in tools.items() if complains()), None)


def _parses(plans: list[Plan]) -> bool:
    try:
        for plan in plans:
            for cache in ("kv", "ec"):
                transfer_config(plan, cache)
    except ConfigError:
        return False
    return True


def _passes(module: Path, file: str) -> bool:
    """Whether the tests in `file` pass on another module than the repository's."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"tests/infra/{file}", "-q", "-x", "-m", "not nightly"],
        cwd=ROOT,
        env=os.environ | {MODULE_VARIABLE: str(module), "CI": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout
    return done.returncode == 0
