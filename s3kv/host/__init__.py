"""Host memory: who holds which slot, who goes first, and the slab itself."""
