"""Write the parts of the documentation that follow from the code: `python -m scripts.render_docs`.

A test fails when what stands there is not what this would write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from s3kv.cli.app import cli
from s3kv.config import Config
from s3kv.fields import allowed
from scripts import costs, dashboard, format_example, metrics, pictures, reference, results

ROOT = Path(__file__).resolve().parent.parent


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


_CLI = """# The command line

`pip install 's3kv[cli]'`. What stands below is what `s3kv --help` and `s3kv COMMAND --help` print,
rendered by `scripts/render_docs.py`.

`doctor` goes through the client the cache itself uses. Without `--read-only` it writes an object of
1 KiB and one of 8 MiB under `PREFIX/doctor/` and deletes them; without `s3:DeleteObject` it says
which one it has left there, and does not write the second. A warning means that the cache works,
with less; the exit code is 0. What it says to each fault is shown, on moto and on Ceph RGW, by
`tests/cli/doctor/test_faults.py`: no bucket, no credentials, wrong ones, each missing permission,
the wrong region, a wrong clock, path style only, no conditional PUT, checksums refused, nobody
there; and what it says of the host by `test_host.py` and `test_software.py` beside it. The slab is
a memory file, so `/dev/shm` matters to vLLM's own queues only.

`inspect` believes nothing an object says: what has to be known to verify it comes from its key and
from the settings, only the tensors from its header. An object it refuses is a miss to an engine.

`config` prints what its settings are to vLLM; a shell and a YAML reader read it back in
`tests/cli/test_configure.py`.

`cost` multiplies counts with prices, and every price is an option: the tables are Amazon's of the
date in its help, and need looking up before they are relied on. What it says is worked out by hand
in `tests/cli/test_cost.py`.

`warm` makes a running server compute, and so save, the prompts of a file before users ask for them;
`tests/e2e/test_warm.py` does so on vLLM's own server and finds them in the bucket.

`bench` reads as many objects as a prompt has chunks, as many at once as a worker does, and says how
long that took; so what it says of a prompt is measured and not inferred, but for the waits of a
prefix of which nothing is known. The planner's own rule may stop waiting earlier.

Completion of commands and options: `eval "$(_S3KV_COMPLETE=bash_source s3kv)"` in `~/.bashrc`, the
same with `zsh_source` in `~/.zshrc`, and `_S3KV_COMPLETE=fish_source s3kv | source` for fish.

`verify` is the same for many: what it calls damaged was wrong in two readings, and what belongs to
another secret or integrity mode it names and leaves alone (`tests/cli/test_verification.py`).

`gc` deletes an object only if it is still the one it has listed: it looks at it once more right
before (Last-Modified and ETag), and lets the deletion depend on the ETag where the server knows
that. What an engine refreshes, replaces or writes meanwhile stays, and what it still wanted costs
it one 404 and computing it again (`tests/cli/test_gc.py`). It holds the keys of what is to go in
memory, about 0.5 GB for a million, and not those of the rest.

`ls`, `stat`, `du`, `gc` and `verify` list the bucket 1,000 objects per request, and go on where a
listing broke off. They see chunks and items under the prefix and nothing else there may be.
"""


def command_line() -> str:
    """docs/cli.md: the help of every command."""
    commands = [("s3kv", cli), *((f"s3kv {name}", c) for name, c in sorted(cli.commands.items()))]
    sections = [_CLI]
    for name, command in commands:
        context = click.Context(command, info_name=name, terminal_width=100)
        sections.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(sections)


def documents() -> dict[str, Callable[[], str]]:
    """Everything that is rendered: its path from the root, and what writes it."""
    drawn = {f"docs/pictures/{name}.svg": draw for name, draw in pictures.ALL.items()}
    return {
        "deploy/grafana/s3kv.json": dashboard.page,
        "docs/api.md": reference.page,
        "docs/cli.md": command_line,
        "docs/configuration.md": configuration,
        "docs/cost.md": costs.page,
        "docs/metrics.md": metrics.page,
        "docs/object-format.md": format_example.page,
        "docs/peers-benchmark.md": results.peers_page,
        "docs/performance.md": results.page,
        **drawn,
    }


if __name__ == "__main__":
    for path, write in documents().items():
        (ROOT / path).write_text(write())
