"""Verifies the training of a model under a plan (`verify model`)."""
