"""The operator verifier: checks every operator's rule on sample calls in all placements, forward and backward."""
