"""Every mistake in the folder `mistakes` is noticed, and by the tool that is named there.

The tools are asked in this order, and the first that complains ends it:

    fmt        terraform fmt
    validate   terraform validate, of the module and the examples
    source     what the sources tell Terraform and no plan shows
    test       terraform test: the real provider plans, and the module's tests compare
    plans      the expected documents, on everything planned; not asked where a mistake says that
               the module's tests were changed along, because then these were as well. This and
               the one before take turns, file by file
    lint       iam_lint, on the policies in those plans
    parser     s3kv's own parser of its settings, on the outputs in those plans
    docs       the README's tables, and that every variable is described
    use        the module applied to a simulated AWS, and s3kv as its client

Each takes about ten seconds on an idle machine. `-k dashboard` behind the path of this file
runs one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from s3kv.errors import ConfigError
from tests.project import ROOT
from tests.system.infra.checks import (
    format_check,
    policy_complaints,
    source_complaints,
    transfer_config,
    validate,
)
from tests.system.infra.expected import differences
from tests.system.infra.mistakes import Mistake, mistakes
from tests.system.infra.terraform import (
    MODULE_VARIABLE,
    SHOWN,
    TEST_THE_REST,
    Plan,
    Terraform,
    copy_module,
    read_plans,
    show_plans,
)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
MISTAKES = mistakes()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_the_mistake_is_noticed(terraform: Terraform, tmp_path: Path, mistake: Mistake) -> None:
    module = copy_module(tmp_path / "module")
    for change in mistake.changes:
        change.make(module)
    if mistake.caught_by != "fmt":  # the others are not to be noticed by a column out of line
        assert terraform.run(module, "fmt", "-recursive").code == 0
    agreed = any(change.file == "tests" for change in mistake.changes)
    assert first_to_notice(terraform, module, agreed=agreed) == mistake.caught_by


def test_nothing_is_noticed_where_there_is_no_mistake(terraform: Terraform, tmp_path: Path) -> None:
    assert first_to_notice(terraform, copy_module(tmp_path / "module")) is None


def test_there_are_enough_of_them() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 160


def first_to_notice(terraform: Terraform, module: Path, *, agreed: bool = False) -> str | None:
    """The first tool that complains about `module`, a copy; None when all are content. agreed: the
    module's tests and documents were changed along."""
    if format_check(terraform, module).code:
        return "fmt"
    if validate(terraform, module).code:
        return "validate"
    if source_complaints(module):
        return "source"
    terraform.init(module)
    if terraform.run(module, *TEST_THE_REST).code:  # the quicker half
        return "test"
    plans: list[Plan] = []
    for file in SHOWN:
        shown = terraform.run(module, *show_plans(file))
        if shown.code:
            return "test"
        planned = list(read_plans(shown.output))
        if not agreed and any(differences(plan.run, plan) for plan in planned):
            return "plans"
        plans += planned
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
                if f"{cache}_transfer_config" in plan.outputs:  # an example may print one
                    transfer_config(plan, cache)
    except ConfigError:
        return False
    return True


def _passes(module: Path, file: str) -> bool:
    """Whether the tests in `file` pass on another module than the repository's."""
    command = [sys.executable, "-m", "pytest", f"tests/system/infra/{file}", "-q", "-x"]
    environment = os.environ | {MODULE_VARIABLE: str(module), "CI": "true"}
    done = subprocess.run(
        [*command, "-m", "(long or not long) and not nightly"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout
    return done.returncode == 0
