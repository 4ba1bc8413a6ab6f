"""Write the parts of the documentation that follow from the code: `python -m scripts.render_docs`.

A test fails when what stands there is not what this would write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from s3kv import config
from s3kv.cli.app import cli
from scripts import (
    compatibility,
    costs,
    format_example,
    metrics,
    reference,
    results,
)

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
    meanings = reference.attribute_docs(config, "Config")
    lines += [_row(field, meanings[field.name]) for field in dataclasses.fields(config.Config)]
    return "\n".join(lines) + "\n"


def _row(field: dataclasses.Field[Any], meaning: str) -> str:
    if field.default is dataclasses.MISSING:
        default = "required"
    elif config.is_bytes(field.name):
        default = _binary(field.default)
    else:
        default = "–" if field.default is None else f"`{str(field.default).lower()}`"
    return f"| `{field.name}` | {default} | {config.allowed(field.name)} | {meaning} |"


def _binary(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return str(nbytes)


_CLI = """# The command line

Install it with `pip install '.[cli]'` in a checkout. It needs neither vLLM nor torch, except that
`serve` starts vLLM. The texts of the commands below are the
output of `s3kv --help` and `s3kv COMMAND --help`, rendered by `scripts/render_docs.py`.

`doctor` goes through the client the cache itself uses. Without `--read-only` it writes an object of
1 KiB and one of 8 MiB under `PREFIX/doctor/` and deletes them; without `s3:DeleteObject` it says
which one it has left there, and does not write the second. To measure what a worker can read, it
reads the second as many times at once as a worker reads objects (32 times by default, 256 MiB, and
less where that would take ten seconds); `--bandwidth` with the length of your chunks measures that
for your model. If `bucket_bytes` or `bucket_idle_s` is set, it also says that this engine cannot
keep the bucket to it. With `disk_path` it makes that directory, and measures the disk: it writes
four files of 8 MiB, each with an fsync, and reads each back from the disk. They have no name, so
nothing is left behind. With `--read-only` it does neither. It reads the secret of
`integrity: blake3-keyed`. With `encryption` it reads the master keys, those that KMS decrypts too,
and encrypts three segments of 1 MiB to measure how fast one thread is. A warning means that the
cache works less well; the exit code is 0.
`tests/unit/cli/doctor/test_faults.py` shows its answer to each fault, on moto, SeaweedFS and Ceph
RGW: no bucket, no credentials, wrong ones, each missing permission, the wrong region, a wrong
clock, path style only, no conditional PUT, checksums refused, no server. `test_host.py` beside it
shows its findings on the host. `doctor` may run beside engines: the memory that their slabs have
counts as available, and `--workers` is the number of all their workers. The slab is a memory file,
so `/dev/shm` matters only to vLLM's own queues and to its `OffloadingConnector`. With a tier, from
`--config` with all of `--kv-transfer-config`, `doctor` compares `cpu_bytes_to_use` with the memory
and with `/dev/shm`, for one engine; what a running engine of that kind has does not count as
available.

`verify` verifies an object by its key and the settings, and takes only the tensors from its
header. An engine treats an object that `verify` refuses as a miss. An object is a safetensors
file: any program that reads these shows its numbers.

`serve` replaces itself with vLLM's server, so signals and the exit code are vLLM's. It needs vLLM
in the same environment, but does not import it: vLLM's version says whether it is a build for CPUs,
a table in its source which models are multi-modal. A model's `config.json` is read from its folder,
or downloaded from Hugging Face's hub as vLLM does next. With vLLM's `OffloadingConnector` the
settings `host_bytes`, `chunk_tokens` and `share_ranks` become vLLM's `cpu_bytes_to_use` (for all
workers of an engine), `block_size` and `canonical_layout`; without `chunk_tokens` an object has the
number of vLLM's blocks that come nearest to 256 tokens. That memory is in `/dev/shm`, and at most
half of what is free in it.
From a file with such a configuration (`--config`, `--settings`) every command takes the settings of
the tier, and from one of a `MultiConnector` those of s3kv in it. `tests/unit/cli/test_serve.py` has
the command for each kind of vLLM.

`config` prints its settings in the form that vLLM takes; `tests/unit/cli/test_configure.py` reads
its output back with a shell and a YAML reader. How many chunks `host_bytes` holds is in the line
that an engine logs when it starts.

`cost` multiplies counts by prices, and every price is an option: the tables are Amazon's of the
date in its help, and need to be checked before they are relied on. `tests/unit/cli/test_cost.py`
compares its results with calculations by hand.

To fill the bucket before users ask, send the prompts to a running server with any client, for one
token each; what is not in the bucket is computed and saved in the background:

```python
llm = vllm.LLM(model, kv_transfer_config=kv_transfer_config)  # or a client of `vllm serve`
llm.generate(prompts, vllm.SamplingParams(max_tokens=1))
```

Completion of commands and options: `eval "$(_S3KV_COMPLETE=bash_source s3kv)"` in `~/.bashrc`, the
same with `zsh_source` in `~/.zshrc`, and `_S3KV_COMPLETE=fish_source s3kv | source` for fish.

`verify` does the same for many objects. It calls an object damaged if two readings were wrong. It
names objects of another secret or integrity mode and leaves them alone
(`tests/unit/cli/test_verify.py`).

`gc` deletes an object only if it is still the one it has listed: it checks Last-Modified and ETag
right before the deletion, and makes the deletion conditional on the ETag if the server supports
that. Objects that an engine refreshes, replaces or writes meanwhile stay. An engine that still
wanted a deleted object gets one 404 and computes it again (`tests/unit/cli/test_gc.py`). `gc` holds
only the keys of the objects to delete in memory, about 0.5 GB for a million. Before it deletes more
than half of the bytes it asks; without a terminal, as in a cron job, it then deletes nothing and
exits with 2, unless `--yes` is given.

With `--disk PATH`, `ls` and `gc` do the same on a host's [local disk](disk.md), as the engines'
user, and then need neither `--bucket` nor credentials. There an age is the time since the last use.
While an engine deletes files in that directory, `gc` exits with 3 (`tests/unit/cli/test_disk.py`).
With a NAMESPACE, `gc` counts and deletes the objects of that one alone, in the bucket as on the
disk; `--max-bytes 0` empties it.

`ls`, `gc` and `verify` list the bucket 1,000 objects per request, and resume where a
listing broke off. They see only chunks and items under the prefix; if there are none, they say on
stderr what lies next to it. On a terminal, long work shows its rate and, where its end is known,
the time left.
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
    return {
        "README.md": results.readme,
        "docs/api.md": reference.page,
        "docs/cli.md": command_line,
        "docs/compatibility.md": compatibility.page,
        "docs/configuration.md": configuration,
        "docs/cost.md": costs.page,
        "docs/metrics.md": metrics.page,
        "docs/object-format.md": format_example.page,
        "docs/peers-benchmark.md": results.peers_page,
        "docs/performance.md": results.page,
    }


if __name__ == "__main__":
    for path, write in documents().items():
        (ROOT / path).write_text(write())
