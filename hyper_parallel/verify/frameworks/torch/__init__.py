"""PyTorch for the harness."""
