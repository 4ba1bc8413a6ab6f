"""Write the tables of terraform/README.md from the module: `python -m scripts.render_terraform`.

What stands between the marks is replaced. A test fails when it is not what this would write.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hcl2

from scripts.marks import table

MODULE = Path(__file__).resolve().parent.parent / "terraform"
BEGIN, END = "<!-- BEGIN_TF_DOCS -->", "<!-- END_TF_DOCS -->"


def readme(module: Path = MODULE) -> str:
    """The whole of the module's README.md, as it should be."""
    before, rest = (module / "README.md").read_text().split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{tables(module)}{END}{after}"


def tables(module: Path = MODULE) -> str:
    """Variables, outputs and resources of the module."""
    given = [_variable(name, told) for name, told in variables(module)]
    found = [(f"`{name}`", _text(told["description"])) for name, told in outputs(module)]
    kinds = {_unquoted(kind) for block in _blocks(module, "resource") for kind in _keys(block)}
    parts = {
        "Variables": table(("variable", "type", "default", ""), given),
        "Outputs": table(("output", ""), found),
        "Resources": ", ".join(f"`{kind}`" for kind in sorted(kinds)),
    }
    return "\n\n".join(f"### {name}\n\n{part}" for name, part in parts.items()) + "\n"


def variables(module: Path = MODULE) -> list[tuple[str, dict[str, Any]]]:
    """Name and attributes of every variable, in the order of the file."""
    return _named(module, "variable")


def outputs(module: Path = MODULE) -> list[tuple[str, dict[str, Any]]]:
    """Name and attributes of every output, in the order of the file."""
    return _named(module, "output")


def _named(module: Path, kind: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (_unquoted(name), block[name]) for block in _blocks(module, kind) for name in _keys(block)
    ]


def _blocks(module: Path, kind: str) -> list[dict[str, Any]]:
    return [
        block
        for path in sorted(module.glob("*.tf"))
        for block in hcl2.loads(path.read_text()).get(kind, [])
    ]


def _keys(block: dict[str, Any]) -> list[str]:
    return [key for key in block if not key.startswith("__")]


def _variable(name: str, told: dict[str, Any]) -> tuple[str, ...]:
    kind = re.sub(r"^\$\{(.*)\}$", r"\1", told["type"])
    default = f"`{_default(told['default'])}`" if "default" in told else "required"
    return f"`{name}`", f"`{kind}`", default, _text(told["description"])


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _text(quoted: str) -> str:
    return _unquoted(quoted).replace('\\"', '"').replace("|", "\\|")


def _unquoted(text: str) -> str:
    return text.removeprefix('"').removesuffix('"')


if __name__ == "__main__":
    (MODULE / "README.md").write_text(readme())
