"""Terraform for the tests of this folder, and what is computed once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import skip_or_fail
from tests.system.infra.applied import Applied, applied
from tests.system.infra.terraform import (
    SHOWN,
    Plan,
    Result,
    Terraform,
    ToolMissing,
    read_plans,
    show_plans,
)

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.infra)
            # Where tests are shared out over processes: one of them has the provider.
            item.add_marker(pytest.mark.xdist_group("terraform"))


@pytest.fixture(scope="session")
def terraform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terraform]:
    """Without terraform or its provider the tests are skipped, on CI they fail."""
    try:
        terraform = Terraform(tmp_path_factory.mktemp("terraform"))
    except ToolMissing as missing:
        skip_or_fail(str(missing))
    yield terraform
    terraform.close()


@pytest.fixture(scope="session")
def planned(terraform: Terraform) -> Result:
    """The tests of the module whose plans are looked at once more, from Python."""
    return terraform.run(terraform.module, *show_plans(*SHOWN))


@pytest.fixture(scope="session")
def plans(planned: Result) -> dict[str, Plan]:
    """What those tests planned, by the name of the run."""
    return {plan.run: plan for plan in read_plans(planned.output)}


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory, terraform: Terraform) -> Iterator[Applied]:
    """The module applied to a simulated AWS, but for the lifecycle rules (see `applied`)."""
    with applied(terraform, tmp_path_factory.mktemp("applied")) as cloud:
        yield cloud
