"""Implementation of the harness interface for PyTorch."""
