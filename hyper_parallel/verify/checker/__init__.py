"""Checks placements: runs a function on ranks, gathers its results, and compares them with one device."""
