"""Stores: where objects lie. S3 over two clients, and a directory of a disk."""
