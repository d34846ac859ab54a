"""Documented bugs of distributed training as small programs, broken and fixed, and the harness's verdicts on them."""
