"""Proof that serving KV from a bucket changes no answer: `s3kv prove`.

`prompts` are generated from a seed; `arms` runs an `engine` for each arm, in an `arm_process`;
`judge` decides; `report` and `page` present the outcome.
"""
