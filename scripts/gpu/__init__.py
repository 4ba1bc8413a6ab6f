"""A first look at s3kv on a machine that has a GPU and little else; README.md says how."""
