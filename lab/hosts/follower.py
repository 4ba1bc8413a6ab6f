"""`vllm serve --headless`: the ranks of an engine on a host that does not have its head.

A program of its own, because the command asks for a distribution of the name "vllm", and the one
for CPUs has another.
"""

from __future__ import annotations

from vllm.entrypoints.cli.serve import make_arg_parser, run_headless
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    arguments.api_server_count = 0
    run_headless(arguments)
