"""What is written about the module is what it is. Needs no terraform."""

from __future__ import annotations

import re
from dataclasses import fields

import hcl2
import pytest

from s3kv.config import Config
from scripts import render_terraform
from tests.system.infra.terraform import MODULE


def test_the_tables_are_current() -> None:
    written = (MODULE / "README.md").read_text()
    assert written == render_terraform.readme(MODULE), "run: python -m scripts.render_terraform"


@pytest.mark.parametrize(
    ("name", "told"), render_terraform.variables(MODULE), ids=lambda v: str(v)[:30]
)
def test_every_variable_is_described_typed_and_checked(name: str, told: dict[str, object]) -> None:
    assert told.get("description"), name
    assert told.get("type"), name
    free = {"bool", "${map(string)}"}  # every value of these types is right
    assert told.get("validation") or str(told["type"]).strip('"') in free, name


@pytest.mark.parametrize(
    ("name", "told"), render_terraform.outputs(MODULE), ids=lambda v: str(v)[:30]
)
def test_every_output_is_described(name: str, told: dict[str, object]) -> None:
    assert told.get("description"), name


def test_the_settings_it_lets_through_are_those_of_s3kv() -> None:
    (block,) = hcl2.loads((MODULE / "variables.tf").read_text())["locals"]
    names = [name.strip('"') for name in block["setting_names"]]
    assert names == sorted({f.name for f in fields(Config)} - {"bucket", "prefix", "region"})


def test_variables_and_locals_are_all_used() -> None:
    sources = "\n".join(path.read_text() for path in MODULE.glob("*.tf"))
    unused = [
        n for n, _ in render_terraform.variables(MODULE) if not re.search(rf"var\.{n}\b", sources)
    ]
    local_blocks = re.findall(r"^locals \{\n(.*?)^\}", sources, re.MULTILINE | re.DOTALL)
    named = re.findall(r"^  (\w+) *=", "\n".join(local_blocks), re.MULTILINE)
    unused += [name for name in named if not re.search(rf"local\.{name}\b", sources)]
    assert unused == []


def test_what_to_verify_on_aws_is_eight_commands() -> None:
    text = (MODULE / "VERIFY.md").read_text()
    commands = re.findall(r"^aws (\w+) ([\w-]+)", text, re.MULTILINE)
    assert len(commands) == len(re.findall(r"^\*\*\d\. ", text, re.MULTILINE)) == 8
    assert {service for service, _ in commands} == {"s3api", "cloudwatch"}


def test_the_versions_told_are_those_required_everywhere() -> None:
    (told,) = re.findall(
        r"Terraform ([\d.]+) or later, AWS provider ([\d.]+) or later \(below (\d+)\)",
        (MODULE / "README.md").read_text(),
    )
    terraform, lowest, below = told
    files = [MODULE / "versions.tf", *sorted(MODULE.glob("examples/*/versions.tf"))]
    assert len(files) == 1 + len([*MODULE.glob("examples/*/main.tf")])
    for file in files:
        (block,) = hcl2.loads(file.read_text())["terraform"]
        assert block["required_version"] == f'">= {terraform}"', file
        (providers,) = block["required_providers"]
        assert providers["aws"] == {
            "source": '"hashicorp/aws"',
            "version": f'">= {lowest}, < {below}.0"',
        }, file


def test_links_lead_somewhere() -> None:
    for document in render_terraform.MODULE.glob("*.md"):  # also out of it, so not in a copy
        for target in re.findall(r"\]\(([^)#\s]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
