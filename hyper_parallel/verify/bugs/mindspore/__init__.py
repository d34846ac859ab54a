"""Documented bugs as programs in plain MindSpore."""
