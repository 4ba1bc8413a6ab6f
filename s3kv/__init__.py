"""A tiered KV cache for vLLM: GPU, pinned host memory, S3."""

__version__ = "0.1.0.dev0"
