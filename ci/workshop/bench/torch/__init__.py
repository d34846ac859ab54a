"""Rows of ``bench`` on PyTorch, beside its own distributed tensors and its own parallelism."""
