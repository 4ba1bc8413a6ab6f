"""Checks that the tests of this folder share with whatever else looks at a plan."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from s3kv.config import Config
from tests.infra.iam_lint import lint
from tests.infra.terraform import Plan, Result, Terraform

POLICIES = {
    "aws_s3_bucket_policy": "policy",
    "aws_iam_policy": "policy",
    "aws_iam_role": "assume_role_policy",
    "aws_vpc_endpoint": "policy",
}
"""Where policies are, by type of resource."""


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
    settings = Config.parse(transfer[f"{cache}_connector_extra_config"])
    return transfer[f"{cache}_role"], settings
