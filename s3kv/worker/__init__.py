"""One worker's jobs, free of vLLM: step plans carried out, encoder outputs uploaded."""
