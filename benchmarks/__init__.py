"""Measurements of parts of s3kv, each run as `python -m benchmarks.<part>`, JSON on stdout."""
