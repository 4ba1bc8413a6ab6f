"""Stores: where objects lie. S3 over two clients."""
