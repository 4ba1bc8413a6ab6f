"""s3kv beside other connectors: `python -m benchmarks.peers`."""
