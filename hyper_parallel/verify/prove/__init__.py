"""Proofs for every size: rows of rules, and plans that use them."""
