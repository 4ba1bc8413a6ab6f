"""Copies on a GPU: streams, events, the driver's batch call and pinned memory."""
