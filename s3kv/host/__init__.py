"""Host memory: the slab, the tables of what it holds, and their order of eviction."""
