"""Copies on a GPU: streams, events and pinned memory."""
