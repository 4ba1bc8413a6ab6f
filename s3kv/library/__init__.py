"""Library for programs without vLLM: `TieredStore`, the tiers driven by a caller's asyncio loop.

Importing it raises `ImportError` if another package `s3kv` is in the way.
"""

import vllm_s3kv

vllm_s3kv.check()
