"""Proves rows of rules, and plans that use them, for every size."""
