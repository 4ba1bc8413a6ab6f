"""Object tier: keys, the object format, and the stores. Bytes and asyncio; no torch."""
