"""Tests on the real engine: vLLM in processes of its own, on a CPU."""
