"""Entry point of the command line, and of `python -m s3kv.cli`."""

from __future__ import annotations

import importlib
import io
import signal
import sys

import vllm_s3kv

_NEEDED = ("click", "rich")


def main() -> None:
    """Run the command line; if a package is missing, print what to install and exit with 2.

    Raises `KeyboardInterrupt` on Ctrl-C, which click would turn into its own exit code.
    """
    try:
        for name in _NEEDED:
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        sys.stderr.write(f"the command line needs the package {error.name}: ")
        sys.stderr.write("pip install 'vllm-s3kv[cli]'\n")
        sys.exit(2)
    import click

    from s3kv.cli.app import cli

    stdout = sys.stdout
    for stream in (stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack characters
            stream.reconfigure(errors="replace")
    try:
        sys.exit(cli(prog_name="s3kv", standalone_mode=False))
    except SystemExit as error:
        # If the pipe is closed, rich exits with 1 at once, and click after it has replaced stdout.
        if isinstance(error.__context__, BrokenPipeError) or sys.stdout is not stdout:
            sys.exit(128 + signal.SIGPIPE)
        raise
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        raise KeyboardInterrupt from None
    except (OSError, MemoryError) as error:  # a full disk behind stdout, a size beyond the memory
        sys.stderr.write(f"s3kv: {error if str(error) else 'there is not enough memory'}\n")
        sys.exit(3)


if __name__ == "__main__":
    vllm_s3kv.main()
