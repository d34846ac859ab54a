"""The operator verifier: every rule, on every sample, in every placement, forward and backward."""
