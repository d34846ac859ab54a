"""What users add: operators, strategies, differentiable functions, functions of local tensors, plans of modules."""
