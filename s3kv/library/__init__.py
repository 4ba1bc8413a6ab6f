"""Library for programs without vLLM: `TieredStore`, the tiers driven by a caller's asyncio loop."""
