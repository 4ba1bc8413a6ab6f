"""Terraform with the AWS provider, wherever this machine has them, in directories of our own.

Nothing here reaches AWS: the provider gets keys that open nothing, and the caller's own settings
and credentials are kept out of its environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULE_VARIABLE = "S3KV_TEST_TERRAFORM_MODULE"
"""Environment variable that names another copy of the module to test than the repository's."""
MODULE = Path(
    os.environ.get(
        MODULE_VARIABLE, Path(__file__).resolve().parent.parent.parent.parent / "terraform"
    )
)

TESTS = MODULE / "tests"
SHOWN = ("standard", "eks", "variants", "kms", "express", "examples")
"""The files of tests whose plans are compared whole. A shown plan is 13 MB of JSON, so the others,
which refuse or accept values, are only run."""
TEST_THE_REST = (
    "test",
    "-json",
    *(
        f"-filter=tests/{p.name}"
        for p in sorted(TESTS.iterdir())
        if p.suffix == ".hcl" and p.name.split(".")[0] not in SHOWN
    ),
)


def show_plans(*files: str) -> list[str]:
    """The command that runs these files of the module's tests and prints what they plan."""
    return ["test", "-json", "-verbose", *(f"-filter=tests/{name}.tftest.hcl" for name in files)]


PROVIDER_MIRRORS = ("/opt/tf-plugins", "/usr/share/terraform/plugins", "/usr/local/share/terraform")
"""Where a filesystem mirror of providers may lie; the environment's TF_PLUGIN_DIR comes first."""


class ToolMissing(Exception):
    """Terraform or its provider is not to be had here; the message says what was tried."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended, and what it printed on either stream."""

    code: int
    output: str


class Terraform:
    """Runs terraform, and a provider for all its commands: to start one takes seconds, and each
    command would start several. `home` is an empty directory. Raises `ToolMissing`.

    module: a copy of the module, ready for every command; not to be changed.
    """

    def __init__(self, home: Path) -> None:
        program = shutil.which("terraform")
        if program is None:
            raise ToolMissing("terraform is not on the PATH")
        self._program = program
        settings = home / "terraformrc"
        settings.write_text(_settings(_mirror()))
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "TF_"))}
        self._environment = kept | {
            "TF_CLI_CONFIG_FILE": str(settings),
            "TF_IN_AUTOMATION": "1",
            "CHECKPOINT_DISABLE": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
        self.module = copy_module(home / "module")
        self.init(self.module)
        self._provider = self._start_provider()

    def run(self, directory: Path, *arguments: str) -> Result:
        return self._result([self._program, *arguments], directory)

    def shell(self, directory: Path, commands: str, answer: str = "") -> Result:
        """Run a shell's commands in `directory`, and give `answer` to what they ask."""
        return self._result(["bash", "-ec", commands], directory, answer)

    def _result(self, command: list[str], directory: Path, answer: str = "") -> Result:
        done = subprocess.run(
            command,
            cwd=directory, env=self._environment, input=answer, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return Result(done.returncode, done.stdout)

    def init(self, directory: Path) -> None:
        """Link the provider and the modules."""
        done = self.run(directory, "init", "-backend=false", "-input=false", "-no-color")
        if done.code != 0:
            where = _mirror() or "the registry (no mirror found, TF_PLUGIN_DIR not set)"
            raise ToolMissing(f"terraform init with providers from {where}: {done.output}")

    def close(self) -> None:
        self._provider.kill()
        self._provider.communicate()

    def _start_provider(self) -> subprocess.Popen[str]:
        providers = self.module / ".terraform/providers/registry.terraform.io/hashicorp/aws"
        (program,) = providers.glob("*/*/terraform-provider-aws*")
        # It is to end with us, however we end.
        leash = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        provider = subprocess.Popen(
            [*leash, str(program), "-debug"],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for line in provider.stdout:
            if match := re.search(r"TF_REATTACH_PROVIDERS='(.*)'", line):
                self._environment["TF_REATTACH_PROVIDERS"] = match[1]
                return provider
        raise ToolMissing(f"{program} -debug ended without saying how to attach to it")


def _mirror() -> str | None:
    named = os.environ.get("TF_PLUGIN_DIR")
    candidates = (named,) if named else PROVIDER_MIRRORS
    for path in candidates:
        if (Path(path) / "registry.terraform.io/hashicorp/aws").is_dir():
            return path
    return None


def _settings(mirror: str | None) -> str:
    lines = ["disable_checkpoint = true"]
    if mirror is not None:
        lines.append(f'provider_installation {{ filesystem_mirror {{ path = "{mirror}" }} }}')
    return "\n".join(lines) + "\n"


def copy_module(directory: Path) -> Path:
    """The module, its examples and its tests in a new `directory`, without what a run leaves."""
    left = shutil.ignore_patterns(".terraform*", "*.tfstate*")
    module = Path(shutil.copytree(MODULE, directory, symlinks=True, ignore=left))
    # A checkout without symbolic links has the text of this one in its place.
    variables = module / "tests" / "variables" / "variables.tf"
    variables.unlink()
    variables.symlink_to("../../variables.tf")
    return module


@dataclass(frozen=True, slots=True)
class Plan:
    """What one `run` block of the tests planned."""

    run: str
    resources: Mapping[str, Mapping[str, Any]]
    """By address: the attributes planned, as far as they are known."""
    unknown: Mapping[str, Any]
    """By address: what only the apply makes known, True in the place of each value."""
    outputs: Mapping[str, Any]
    unknown_outputs: frozenset[str]
    sensitive_outputs: frozenset[str]


def read_plans(lines: str) -> Iterator[Plan]:
    """Every plan in the output of `terraform test -json -verbose`. A line holds the
    provider's whole schema, megabytes of it; only the parts needed are decoded."""
    for line in lines.splitlines():
        if '"test_plan":{' in line:
            changes = _part(line, "resource_changes") or []
            outputs = _part(line, "output_changes") or {}
            yield Plan(
                run=_part(line, "@testrun"),
                resources={c["address"]: c["change"].get("after") or {} for c in changes},
                unknown={c["address"]: c["change"].get("after_unknown") for c in changes},
                outputs={name: change.get("after") for name, change in outputs.items()},
                unknown_outputs=_marked(outputs, "after_unknown"),
                sensitive_outputs=_marked(outputs, "after_sensitive"),
            )


def _marked(outputs: dict[str, Any], mark: str) -> frozenset[str]:
    return frozenset(name for name, change in outputs.items() if change.get(mark))


def _part(line: str, name: str) -> Any:
    mark = f'"{name}":'
    start = line.find(mark)
    if start < 0:
        return None
    value, _ = json.JSONDecoder().raw_decode(line, start + len(mark))
    return value


def read_complaints(lines: str) -> list[str]:
    """What went wrong in a run with -json, a text for each."""
    complaints = []
    for line in lines.splitlines():
        if '"type":"diagnostic"' in line:
            told = json.loads(line)
            diagnostic = told["diagnostic"]
            what = f"{diagnostic['summary']}: {diagnostic['detail']}"
            complaints.append(f"{told.get('@testrun', '')}: {what}")
    return complaints
