"""Checks that ranks call the same collectives: fingerprints of calls, and their comparison."""
