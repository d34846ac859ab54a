"""Host operations on PyTorch tensors, and process-wide state of PyTorch that is kept per simulated rank."""
