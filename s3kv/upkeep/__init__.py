"""Upkeep of a bucket: sweep, refresh, cleaner, costs and the registration of namespaces."""
