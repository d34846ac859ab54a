"""Compares any two runs of programs: `verify diff`."""
