"""One of three commands: `python -m scripts.gpu first|second|third [--only PART …] [--dry-run]`.

--pack: what `python -m scripts.gpu.pack` has made. Without it nothing is unpacked.
--out: the folder for the results; `build/gpu` unless told otherwise.
--only: the parts whose names begin so; all unless told otherwise.
--dry-run: the whole command on a machine without a GPU, up to where CUDA begins.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu.commands import COMMANDS
from scripts.gpu.pack import unpack
from scripts.gpu.parts import ROOT, run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="s3kv-gpu-") as site:
        path = [str(ROOT)]
        if options.pack is not None:
            unpack(options.pack, Path(site), compiled=not options.dry_run)
            path = [site, *path]
        path += filter(None, [os.environ.get("PYTHONPATH")])
        # vLLM remembers what it has seen of a model; the next machine remembers nothing.
        fresh = {"VLLM_CACHE_ROOT": str(Path(site) / "cache")} if options.dry_run else {}
        env = os.environ | fresh | {"PYTHONPATH": os.pathsep.join(path)}
        out = options.out.resolve()
        chosen = tuple(options.only)
        stages = [
            [part for part in stage if part.name.startswith(chosen)]
            for stage in COMMANDS[options.command]
        ]
        stages = [stage for stage in stages if stage]
        well = run(options.command, stages, out, env, rehearse=options.dry_run)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
