"""Host operations on tensors of PyTorch, and the states of a PyTorch process that simulated ranks have of their own."""
