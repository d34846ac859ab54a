"""Rows of ``bench`` on PyTorch, compared with its own distributed tensors and its own parallelism."""
