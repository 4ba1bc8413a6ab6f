"""Host memory: the slab, the tables of what it holds, and the eviction policies."""
