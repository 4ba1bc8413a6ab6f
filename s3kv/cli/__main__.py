"""Start of the command line, and of `python -m s3kv.cli`."""

from __future__ import annotations

import importlib
import sys

_NEEDED = ("click", "rich")


def main() -> None:
    """Run the command line; if a package is missing, say what to install and exit with 2."""
    try:
        for name in _NEEDED:
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        sys.stderr.write(f"the command line needs the package {error.name}: ")
        sys.stderr.write("pip install 'vllm-s3kv[cli]'\n")
        sys.exit(2)
    from s3kv.cli.app import cli

    cli(prog_name="s3kv")


if __name__ == "__main__":
    main()
