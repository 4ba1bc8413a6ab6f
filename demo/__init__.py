"""`make demo`: what s3kv does, on a small model, in a minute."""
