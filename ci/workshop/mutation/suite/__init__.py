"""Trials: what the library's own code, changed in one place, must pass."""
