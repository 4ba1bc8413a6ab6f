"""`make demo` and `make demo-chat`: what s3kv does, on a small model."""
