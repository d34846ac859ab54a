"""Host operations on tensors, and process-wide state that is kept separately for each simulated rank."""
