"""What both frameworks share: tensors, operator rules and parallel plans."""
