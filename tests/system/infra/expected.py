"""The expected documents: everything the module and its examples plan, whole, for review.

The folder `expected` holds a document for each `run` block of the tests whose plans are shown
(`SHOWN`): every resource with every attribute, and every output. A plan that differs from its
document in anything fails `test_the_plan_is_the_expected_one`. After an intended change run

    python -m tests.system.infra.expected

read what `git diff tests/system/infra/expected` shows, and commit it with the change.

A document that names another in `like` holds what differs from it. In a document, JSON within a
string (a policy, a dashboard, a setting of vLLM) stands decoded.
Left out is what has no value, and `tags_all`, which repeats `tags`. What only the apply makes known
is listed under `known after apply`: an attribute that gets a value moves out of that list.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.system.infra.terraform import SHOWN, Plan, Terraform, read_plans, show_plans

DIRECTORY = Path(__file__).with_name("expected")
UNKNOWN = "known after apply"
GONE = "not here"
"""In the place of what the other document has and this one has not."""
LIKE = {
    **dict.fromkeys(("china", "express_watched", "kms", "standard", "tuned"), "eks"),
    **{"bare": "tuned", "data_keys": "kms", "express": "express_watched", "kept": "kms"},
    **dict.fromkeys(("example_eks_irsa", "example_express", "example_kms"), "example_minimal"),
    "example_eks_pod_identity": "example_eks_irsa",
}
"""The run whose document is nearest to that of another run."""
_LINE = 140
"""Columns of a document."""

_INVENTED = {"create_date", "id", "key_id", "name_prefix", "policy_id", "unique_id"}
"""What Terraform invents, anew in every run, for a resource whose ARN the tests give it."""
_GIVEN_AN_ARN = re.compile(
    r"(.+\.)?(aws_iam_policy\.(access|data_keys)|aws_iam_role\.eks|aws_kms_key)\b.*"
)


def document(plan: Plan) -> dict[str, Any]:
    """What is expected of `plan`, were it right."""
    return {
        "resources": {
            address: _resource(address, attributes, plan.unknown[address])
            for address, attributes in sorted(plan.resources.items())
        },
        "outputs": {
            name: UNKNOWN if name in plan.unknown_outputs else _decoded(value)
            for name, value in sorted(plan.outputs.items())
        },
        "sensitive outputs": sorted(plan.sensitive_outputs),
    }


def expected(run: str) -> dict[str, Any]:
    """The committed document of a run, whole. Raises `FileNotFoundError`."""
    written: dict[str, Any] = json.loads(_path(run).read_text())
    like = written.pop("like", None)
    return written if like is None else _merged(expected(like), written)


def runs() -> list[str]:
    return sorted(path.stem for path in DIRECTORY.glob("*.json"))


def differences(run: str, plan: Plan) -> list[str]:
    """How `plan` differs from what is expected of `run`, a line for each place."""
    found = _differences((), expected(run), json.loads(json.dumps(document(plan))))
    return [f"{run}: {difference}" for difference in found]


def all_differences(plans: Iterable[Plan]) -> list[str]:
    """The differences of all plans; a run without a document or a plan is one as well."""
    planned = {plan.run: plan for plan in plans}
    found = [f"{run}: is expected, and was not planned" for run in runs() if run not in planned]
    for run, plan in planned.items():
        if run in runs():
            found += differences(run, plan)
        else:
            found.append(f"{run}: has no document")
    return found


def write(plans: Iterable[Plan]) -> None:
    """Replace all documents by those of `plans`."""
    DIRECTORY.mkdir(exist_ok=True)
    for path in DIRECTORY.glob("*.json"):
        path.unlink()
    documents = {plan.run: json.loads(json.dumps(document(plan))) for plan in plans}
    for run, whole in documents.items():
        like = LIKE.get(run)
        told = whole if like is None else {"like": like} | _changes(documents[like], whole)
        _path(run).write_text(_rendered(told) + "\n")


def _changes(other: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """What makes `whole` of `other`, by `_merged`."""
    changes: dict[str, Any] = dict.fromkeys(other.keys() - whole.keys(), GONE)
    for key, value in whole.items():
        if isinstance(value, dict) and isinstance(other.get(key), dict):
            if inner := _changes(other[key], value):
                changes[key] = inner
        elif json.dumps(value, sort_keys=True) != json.dumps(other.get(key), sort_keys=True):
            changes[key] = value
    return changes


def _merged(other: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    whole = dict(other)
    for key, value in changes.items():
        if value == GONE:
            del whole[key]
        elif isinstance(value, dict) and isinstance(whole.get(key), dict):
            whole[key] = _merged(whole[key], value)
        else:
            whole[key] = value
    return whole


def _path(run: str) -> Path:
    return DIRECTORY / f"{run}.json"


def _resource(address: str, attributes: Any, unknown: Any) -> dict[str, Any]:
    told = {name: value for name, value in attributes.items() if name != "tags_all"}
    if _GIVEN_AN_ARN.fullmatch(address):
        told = {name: value for name, value in told.items() if name not in _INVENTED}
    resource: dict[str, Any] = _decoded(told)
    later = sorted(name for name in _true_paths(unknown) if not name.startswith("tags_all"))
    return resource | ({UNKNOWN: later} if later else {})


def _true_paths(unknown: Any, path: str = "") -> Iterator[str]:
    if unknown is True:
        yield path
    elif isinstance(unknown, dict | list):
        parts = unknown.items() if isinstance(unknown, dict) else enumerate(unknown)
        for key, part in parts:
            yield from _true_paths(part, f"{path}.{key}" if path else str(key))


def _decoded(value: Any) -> Any:
    """`value` with JSON decoded, and without attributes that have no value."""
    if isinstance(value, str) and value.startswith("{"):
        return _decoded(json.loads(value))
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    if isinstance(value, dict):
        return {k: _decoded(part) for k, part in value.items() if part not in (None, [], {})}
    return value


def _differences(path: tuple[str, ...], right: Any, told: Any) -> Iterator[str]:
    where = " ".join(path)
    if isinstance(right, dict) and isinstance(told, dict):
        for key in sorted(right.keys() | told.keys()):
            if key not in told:
                yield f"{where} {key}: is gone, expected {_short(right[key])}"
            elif key not in right:
                yield f"{where} {key}: is new: {_short(told[key])}"
            else:
                yield from _differences((*path, key), right[key], told[key])
    elif isinstance(right, list) and isinstance(told, list) and len(right) == len(told):
        for i, (one, other) in enumerate(zip(right, told, strict=True)):
            yield from _differences((*path, str(i)), one, other)
    elif right != told or type(right) is not type(told):
        yield f"{where}: is {_short(told)}, expected {_short(right)}"


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _LINE else text[:_LINE] + " ..."


def _rendered(value: Any, indent: str = "") -> str:
    """JSON with what fits into a line on one."""
    line = json.dumps(value, sort_keys=True)
    if len(indent) + len(line) <= _LINE or not isinstance(value, dict | list) or not value:
        return line
    deeper = indent + "  "
    if isinstance(value, list):
        parts = [_rendered(part, deeper) for part in value]
        opening, closing = "[]"
    else:
        parts = [f"{json.dumps(key)}: {_rendered(value[key], deeper)}" for key in sorted(value)]
        opening, closing = "{}"
    inner = ",\n".join(deeper + part for part in parts)
    return f"{opening}\n{inner}\n{indent}{closing}"


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        terraform = Terraform(Path(home))
        try:
            done = terraform.run(terraform.module, *show_plans(*SHOWN))
        finally:
            terraform.close()
    write(read_plans(done.output))


if __name__ == "__main__":
    main()
