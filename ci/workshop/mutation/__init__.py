"""Mutation testing of the verifier: mutants, the suite that must notice them, runners, report."""
