"""Objects: keys, the format, digests, and manifests. Pure."""
