"""Documented bugs of distributed training programs as miniatures, broken and fixed."""
