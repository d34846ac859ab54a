"""Compatibility with programs for another release of this library: import paths and call forms. See README.md."""
