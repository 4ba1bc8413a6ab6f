"""Checks that the tests of this folder share with whatever else looks at a plan."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hcl2

from s3kv.config import Config
from tests.system.infra.iam_lint import lint
from tests.system.infra.terraform import Plan, Result, Terraform

POLICIES = {
    "aws_s3_bucket_policy": "policy",
    "aws_iam_policy": "policy",
    "aws_iam_role": "assume_role_policy",
    "aws_vpc_endpoint": "policy",
}
"""Where policies are, by type of resource."""


META_ARGUMENTS = {
    # S3 refuses changes to one bucket that come at the same time.
    "aws_s3_bucket_policy.this": {
        "depends_on": [
            "${aws_s3_bucket_public_access_block.this}",
            "${aws_s3_bucket_ownership_controls.this}",
        ]
    },
    # With Express the policy holds the right to expire.
    "aws_s3_bucket_lifecycle_configuration.this": {"depends_on": ["${aws_s3_bucket_policy.this}"]},
}
"""What the resources of the module and the examples tell Terraform itself and no plan shows. In
particular nothing is kept from being changed or destroyed."""
_BLOCKS = {"data", "locals", "module", "output", "provider", "resource", "terraform", "variable"}
_ANY_REGION = [{'"aws"': {"region": '"us-east-1"', "__is_block__": True}}]


def source_complaints(module: Path) -> list[str]:
    """What is wrong in the sources and no plan shows: meta-arguments, providers, other blocks."""
    told: dict[str, dict[str, Any]] = {}
    found = []
    for path in sorted(module.glob("**/*.tf")):
        if ".terraform" in path.parts:
            continue
        where = path.relative_to(module)
        blocks = {k: v for k, v in hcl2.loads(path.read_text()).items() if k[:2] != "__"}
        found += [f"{where}: has a block {kind}" for kind in blocks.keys() - _BLOCKS]
        told |= dict(_meta_arguments(blocks.get("resource", []) + blocks.get("data", [])))
        # A module takes its caller's provider. An example's only has a region, and no keys.
        if blocks.get("provider", _ANY_REGION) != _ANY_REGION or (
            "provider" in blocks and where.parent == Path()
        ):
            found.append(f"{where}: the provider is {blocks['provider']}")
    found += [
        f"{address}: tells Terraform {told.get(address)}, expected {META_ARGUMENTS.get(address)}"
        for address in sorted(told.keys() | META_ARGUMENTS.keys())
        if told.get(address) != META_ARGUMENTS.get(address)
    ]
    return found


def _meta_arguments(blocks: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    names = {"depends_on", "lifecycle", "provider", "provisioner", "connection"}
    for block in blocks:
        for kind, resources in block.items():
            for name, attributes in resources.items():
                if found := {key: value for key, value in attributes.items() if key in names}:
                    yield f"{kind}.{name}".replace('"', ""), found


def format_check(terraform: Terraform, module: Path) -> Result:
    return terraform.run(module, "fmt", "-check", "-diff", "-recursive")


def validate(terraform: Terraform, module: Path) -> Result:
    """Validate a copy of the module and every example: one configuration, beside the copy, calls
    them all, because to validate takes seconds, however much it is."""
    calls = ""
    for example in sorted((module / "examples").iterdir()):
        required = re.findall(r'^variable "(\w+)"', (example / "main.tf").read_text(), re.MULTILINE)
        arguments = "".join(f"  {name} = null\n" for name in required)
        source = f"./{module.name}/examples/{example.name}"
        calls += f'module "{example.name}" {{\n  source = "{source}"\n{arguments}}}\n'
    (module.parent / "all.tf").write_text(calls)
    done = terraform.run(module.parent, "init", "-backend=false", "-input=false", "-no-color")
    return done if done.code else terraform.run(module.parent, "validate", "-json")


def policy_complaints(plans: Iterable[Plan]) -> dict[str, list[str]]:
    """What is wrong with the policies, by run and resource. Raises `LookupError` when there is
    a kind of policy that no plan has: then nothing was looked at."""
    found: dict[str, list[str]] = {}
    seen = set()
    for plan in plans:
        for address, attributes in plan.resources.items():
            kind = address.split(".")[0]
            if attribute := POLICIES.get(kind):
                seen.add(kind)
                policy = json.loads(attributes[attribute])
                if complaints := lint(policy, everybody=kind == "aws_vpc_endpoint"):
                    found[f"{plan.run}: {address}"] = complaints
    if missing := POLICIES.keys() - seen:
        raise LookupError(f"no plan has a policy of {', '.join(sorted(missing))}")
    return found


def transfer_config(plan: Plan, cache: str, *, reader: bool = False) -> tuple[str, Config]:
    """The role and the settings in what is printed for vLLM, as s3kv reads them. Raises
    `ConfigError` or `KeyError`. cache: kv or ec."""
    output = f"{'reader_' if reader else ''}{cache}_transfer_config"
    transfer = json.loads(plan.outputs[output])
    return transfer[f"{cache}_role"], Config.parse(transfer[f"{cache}_connector_extra_config"])
