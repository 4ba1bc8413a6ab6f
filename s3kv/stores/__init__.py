"""Stores: where objects lie. S3."""
