"""The command group `s3kv`."""

from __future__ import annotations

import click

from s3kv import __version__
from s3kv.cli.configure import configure
from s3kv.cli.cost import cost
from s3kv.cli.doctor.command import doctor
from s3kv.cli.gc import gc
from s3kv.cli.invocation import EPILOG
from s3kv.cli.ls import ls
from s3kv.cli.prove import prove
from s3kv.cli.serve import serve
from s3kv.cli.verify import verify


@click.group(epilog=EPILOG, context_settings={"max_content_width": 100})
@click.version_option(__version__)
def cli() -> None:
    """Serve models with an s3kv cache, inspect and maintain its bucket, and check its hosts.

    All commands but cost take the settings of the engines: --bucket and the other options, or the
    file with their JSON (--config; --settings for prove and serve). With --json a command prints
    one JSON document and nothing else; ls prints one on every line, and prove writes a file.
    """


for command in (configure, cost, doctor, gc, ls, prove, serve, verify):
    cli.add_command(command)
