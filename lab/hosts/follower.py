"""What `vllm serve --headless` runs on a host that has ranks of an engine and not its head.

The command itself asks for a distribution of the name "vllm", and the one for CPUs has another.
"""

from __future__ import annotations

from vllm.entrypoints.cli.serve import make_arg_parser, run_headless
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    arguments.api_server_count = 0
    run_headless(arguments)
