"""Compression and encryption in a real vLLM engine: `python -m benchmarks.compressed`.

Prompts and engines as in `benchmarks.engine`, on a server with the shape of S3, at several rates of
the link. First bytes take 30 ms each, without S3's tail, which would hide the link. Times are to
the first token. Every round, at each rate (MB/s; 0: no limit), starts seven engines in turn:

    cold-off    computes prompts, saves, uploads plain objects
    warm-off    a new engine, with `compress: auto`, on those: it learns the speed of the link, and
    cold-auto   then computes other prompts, and uploads them as it sees fit
    warm-auto   a new engine on these
    cold-on     computes the first prompts again, and uploads compressed objects
    warm-on     a new engine on those; the same for plain objects that are encrypted
"""

from __future__ import annotations

import secrets
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.deadline import begin, command_line, ends, say
from benchmarks.rig import LARGE, SMALL, Bench, Size, Store, machine, publish, s3
from benchmarks.shaped import Shape, add_options
from lab.models import prompts

MODES = ("off", "on", "auto", "encrypted")


class Rounds(Bench):
    """Rounds at one rate of the link."""

    max_tokens = 1

    def __init__(self, folder: Path, store: Store, size: Size) -> None:
        super().__init__(folder, store, size, *(f"warm-{mode}" for mode in MODES))
        (keys := folder / "keys").touch(0o600)
        keys.write_text(secrets.token_hex(32))
        self._encrypted = {"encryption": "aes-gcm", "encryption_keys_file": str(keys)}
        self._first, self._second = (
            prompts(size.prompts, size.prompt_tokens, seed=seed) for seed in (7, 8)
        )

    def round(self) -> None:
        prefix = f"bench/{uuid.uuid4().hex[:8]}"
        with self.engine("off", prefix, compress="off") as engine:
            self.run("cold-off", engine, self._first)
        with self.engine("auto", prefix, compress="auto") as engine:
            self.run("warm-off", engine, self._first)
            self.run("cold-auto", engine, self._second)
        with self.engine("auto", prefix, compress="auto") as engine:
            self.run("warm-auto", engine, self._second)
        for mode, settings in (("on", {}), ("encrypted", self._encrypted)):
            compress = "off" if settings else "on"
            for name in ("cold", "warm"):
                with self.engine(mode, f"{prefix}-{mode}", compress=compress, **settings) as engine:
                    self.run(f"{name}-{mode}", engine, self._first)

    def result(self) -> dict[str, Any]:
        told = self.told()
        ms = told["median_ms"]
        best = min(ms["warm-on"], ms["warm-off"])
        pairs = ((name, mode) for name in ("warm", "cold") for mode in MODES[1:])
        return told | {
            "warm_auto_over_best": round(ms["warm-auto"] / best, 3),
            **{f"{n}_{m}_over_off": round(ms[f"{n}-{m}"] / ms[f"{n}-off"], 3) for n, m in pairs},
        }


@ends(900)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "few prompts")
    parser.add_argument("--links", type=float, nargs="+", default=[100.0, 1000.0, 0.0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--large", action="store_true", help="8,000 tokens of 128 KiB a prompt")
    add_options(parser)
    options = parser.parse_args(arguments)
    options.shaped, options.weed, options.tls = True, False, False
    size = LARGE if options.large else SMALL
    size = size.quick() if options.quick else size
    links: dict[str, Any] = {}
    told: dict[str, Any] = {}
    for link in options.links:
        options.host_mb_s, options.sigma = link, 0.0
        options.connection_mb_s = Shape().connection_mb_s if link else 0.0
        with s3(options) as store, tempfile.TemporaryDirectory() as folder:
            begin(f"{store.name} at {link:g} MB/s", 7 * options.rounds * size.give_up_s)
            bench = Rounds(Path(folder), store, size)
            for number in range(options.rounds):
                say(f"round {number + 1} of {options.rounds}")
                bench.round()
            links[f"{link:g}"] = bench.result()
            told = store.told()
    about = {"benchmark": "compressed", **told, "machine": machine(), "prompts": size.told()}
    publish(about | {"links_mb_s": links}, options.json)


if __name__ == "__main__":
    main()
