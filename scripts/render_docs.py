"""Write the parts of the documentation that follow from the code: `python scripts/render_docs.py`.

A test fails when what stands in docs/ is not what this would write.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from s3kv.config import Config, allowed

DOCS = Path(__file__).resolve().parent.parent / "docs"


def configuration() -> str:
    """docs/configuration.md: every setting, in the order of `Config`."""
    lines = [
        "# Settings",
        "",
        "Keys of `kv_connector_extra_config`. An unknown key, a wrong type or a value out of range",
        "stops the engine at start with a message that names the setting. Bytes may be written",
        '"4GiB" or "500MB". Rendered from `s3kv/config.py`.',
        "",
        "| setting | default | allowed | meaning |",
        "|---|---|---|---|",
    ]
    lines += [_row(field) for field in dataclasses.fields(Config)]
    return "\n".join(lines) + "\n"


def _row(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        default = "required"
    elif field.metadata["kind"] == "bytes":
        default = _binary(field.default)
    else:
        default = "–" if field.default is None else f"`{str(field.default).lower()}`"
    return f"| `{field.name}` | {default} | {allowed(field)} | {field.metadata['doc']} |"


def _binary(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return str(nbytes)


if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(configuration())
