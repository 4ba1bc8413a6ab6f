"""Device memory: the layout of a chunk's pages, and copies between pages and slots.

The only package below `s3kv.connectors` that imports torch. It runs in the workers, never in the
scheduler and never in the I/O process.
"""
