"""Sources of objects: requests, attempts, pacing, hedging and quarantine."""
