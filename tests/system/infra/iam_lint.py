"""What is wrong with an IAM policy by itself, whatever it is meant for.

Actions, the kinds of resources they have and the conditions they know are AWS's own list (the
package policy_sentry renders it from the Service Authorization Reference). `lint` finds:
actions that do not exist, resources that no action of the statement can have, actions without a
resource they could have, condition keys that no action knows, operators that do not exist, and
permissions for everything or everybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from policy_sentry.shared.iam_data import get_service_prefix_data

_OPERATOR = re.compile(
    r"(ForAllValues:|ForAnyValue:)?("
    r"String(Not)?(Equals(IgnoreCase)?|Like)|Numeric(Not)?Equals|Numeric(Less|Greater)Than(Equals)?"
    r"|Date(Not)?Equals|Date(Less|Greater)Than(Equals)?|Bool|(Not)?IpAddress|Arn(Not)?(Equals|Like)"
    r"|BinaryEquals)(IfExists)?|Null"
)
_PARTS = {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
_GLOBAL_KEYS = {"aws:SecureTransport", "aws:SourceAccount"}
"""Those of AWS's global condition keys that the module uses; the list has them nowhere."""


def lint(policy: dict[str, Any], *, everybody: bool = False) -> list[str]:
    """Everything wrong with `policy`. everybody: it may allow things to everyone (an endpoint's
    policy, which bounds what others grant)."""
    found = []
    if policy.get("Version") != "2012-10-17":
        found.append(f"Version is {policy.get('Version')}")
    for statement in policy["Statement"]:
        where = statement.get("Sid", "statement")
        found += [f"{where}: {wrong}" for wrong in _statement(statement, everybody)]
    return found


def _statement(statement: dict[str, Any], everybody: bool) -> Iterator[str]:
    if unknown := set(statement) - _PARTS:
        yield f"has {', '.join(sorted(unknown))}"
        return
    allows = statement["Effect"] == "Allow"
    actions = listed(statement["Action"])
    if allows:
        yield from (f"allows {action}" for action in actions if "*" in action)
        if statement.get("Principal") == "*" and not everybody:
            yield "allows everybody"
    known = [match for action in actions for match in _matching(action)]
    yield from (f"{action} does not exist" for action in actions if not list(_matching(action)))
    if "Resource" in statement:
        yield from _resources(known, listed(statement["Resource"]), allows)
    for operator, keys in statement.get("Condition", {}).items():
        if not _OPERATOR.fullmatch(operator):
            yield f"{operator} is no operator"
        federated = statement.get("Principal", {}) if allows else {}
        for key in keys:
            if not _known_key(key, known, federated):
                yield f"{key} is no condition of {' or '.join(actions)}"


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _matching(action: str) -> Iterator[tuple[str, str]]:
    """(service, name) of every action that `action`, maybe with wildcards, means."""
    service, _, name = action.partition(":")
    pattern = re.compile(re.escape(name).replace(r"\*", ".*"), re.IGNORECASE)
    for known in (get_service_prefix_data(service) or {}).get("privileges", {}):
        if pattern.fullmatch(known):
            yield service, known


def _resources(actions: list[tuple[str, str]], resources: list[str], allows: bool) -> Iterator[str]:
    used = set()
    for service, name in actions:
        patterns = _arn_patterns(service, name)
        matching = {r for r in resources if any(p.fullmatch(r) for p in patterns)}
        used |= matching
        if allows and not matching:
            yield f"{service}:{name} has no resource it could be allowed on"
    yield from (f"no action can be on {r}" for r in resources if r not in used)


def _arn_patterns(service: str, action: str) -> list[re.Pattern[str]]:
    data = get_service_prefix_data(service)
    types = [name for name in data["privileges"][action]["resource_types"] if name]
    arns = [re.escape(data["resources"][t]["arn"]) for t in types]
    # Behind the fixed part only objects may have a slash: a bucket's ARN is not an object's.
    arns = [re.sub(r"\\\$\\\{ObjectName\\\}", ".+", arn) for arn in arns]
    return [re.compile(re.sub(r"\\\$\\\{\w+\\\}", "[^/]*", arn)) for arn in arns]


def _known_key(key: str, actions: list[tuple[str, str]], principal: Any) -> bool:
    if key in _GLOBAL_KEYS:
        return True
    if isinstance(principal, dict) and "Federated" in principal:
        issuer = principal["Federated"].partition(":oidc-provider/")[2]
        return key in (f"{issuer}:sub", f"{issuer}:aud")
    return any(_fits(key, known) for service, name in actions for known in _keys(service, name))


def _keys(service: str, action: str) -> Iterator[str]:
    data = get_service_prefix_data(service)
    for resource, told in data["privileges"][action]["resource_types"].items():
        yield from told["condition_keys"]
        if resource:
            yield from data["resources"][resource]["condition_keys"]


def _fits(key: str, known: str) -> bool:
    pattern = re.sub(r"\\\$\\\{\w+\\\}|<\w+>", ".+", re.escape(known))
    return re.fullmatch(pattern, key, re.IGNORECASE) is not None
