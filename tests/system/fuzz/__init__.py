"""Hostile bytes, for everything that reads what it did not write itself."""
