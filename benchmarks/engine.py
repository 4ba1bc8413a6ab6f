"""What s3kv does to a real vLLM engine: `python -m benchmarks.engine [--quick] [--large] [--json
FILE]`.

One request after another, as in a chat that starts cold: prompts of 1,600 tokens, 64 KiB of KV per
token, eight tokens out, the median over all prompts and rounds. With `--large` prompts have 8,000
tokens of 128 KiB, as Llama-3-8B has. Every round starts six engines, so that a machine that slows
down slows all of them:

    none     an engine without a connector: a cold pass, then the same prompts again, which hit
             the engine's own prefix cache (the floor: nothing is fetched from anywhere)
    cold     an engine with s3kv on an empty prefix of the bucket: computes, saves, uploads
    warm     a new engine with s3kv on what `cold` left in the bucket
    saving   as `cold`, with a local disk: writes files, too
    disk     a new engine with s3kv on the files that `saving` left, some or all in the page cache
    uncached another one, with none of them there

and after them plain sockets read what each prompt has in the bucket, with no engine beside them
(`raw`): what of the difference between `warm` and `local` is the server's and the network's.

Every engine first writes to all of its KV cache, so that no page of it is touched for the first
time while something is measured. The S3 server: `benchmarks/rig.py`; `--shaped` takes one with the
shape of S3.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.deadline import begin, command_line, ends, say
from benchmarks.floor import Server
from benchmarks.rig import LARGE, SMALL, Bench, Size, Store, add_server, machine, publish, s3
from lab.models import prompts

DISK = {"disk_bytes": "64GiB", "disk_writes": "all"}


def forget(file: Path) -> None:
    """Take a file out of the page cache."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Rounds(Bench):
    def __init__(self, folder: Path, store: Store, size: Size) -> None:
        super().__init__(folder, store, size, "warm", "disk", "uncached")
        self._server = Server(store.url or "", store.bucket, store.s3.env)
        self._long = prompts(size.prompts, size.prompt_tokens, seed=7)
        self._files: list[int] = []

    def round(self) -> None:
        prefix = f"bench/{uuid.uuid4().hex[:8]}"
        with self.engine("none", None) as engine:
            self.run("none", engine, self._long)
            self.run("local", engine, self._long)
        for name in ("cold", "warm"):
            self._pass(name, prefix)
        self._server.read(prefix, self.size.chunks_per_prompt)
        disk = self.folder / uuid.uuid4().hex
        settings = {"disk_path": str(disk), **DISK}
        self._pass("saving", f"{prefix}-disk", **settings)
        self._files.append(len(files := list(disk.rglob("*.safetensors"))))
        self._pass("disk", f"{prefix}-disk", **settings)
        for file in files:
            forget(file)
        self._pass("uncached", f"{prefix}-disk", **settings)
        shutil.rmtree(disk)

    def _pass(self, name: str, prefix: str, **settings: Any) -> None:
        """One pass on an engine of its own."""
        with self.engine(name, prefix, **settings) as engine:
            self.run(name, engine, self._long)

    def result(self) -> dict[str, Any]:
        told, raw = self.told(), self._server.told()
        told["median_ms"]["raw"] = raw["median_ms"]
        return {
            "benchmark": "engine",
            **self.store.told(),
            "machine": machine(),
            "prompts": self.size.told(),
            **told,
            "files_on_disk": self._files,
            "raw": raw,
            "all_ms": {n: [round(1e3 * x) for x in s] for n, s in self.seconds.items()},
        }


@ends(900)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "one round, few prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="8,000 tokens of 128 KiB a prompt")
    add_server(parser)
    options = parser.parse_args(arguments)
    with s3(options) as store, tempfile.TemporaryDirectory() as folder:
        rounds = 1 if options.quick else options.rounds
        size = LARGE if options.large else SMALL
        size = size.quick() if options.quick else size
        begin(store.name, 6 * rounds * size.give_up_s)
        bench = Rounds(Path(folder), store, size)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            bench.round()
        publish(bench.result(), options.json)


if __name__ == "__main__":
    main()
