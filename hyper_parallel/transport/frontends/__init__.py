"""Replacements of the frameworks' own communication functions on ranks of this library."""
