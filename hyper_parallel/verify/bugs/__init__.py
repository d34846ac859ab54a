"""Documented bugs of distributed training as small programs, broken and fixed, and what the harness says of them."""
