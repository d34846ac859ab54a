"""Host operations on tensors, and the process-wide states that each simulated rank has of its own."""
