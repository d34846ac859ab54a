"""The operator verifier: checks every rule on every sample in every placement, forward and backward."""
