"""User extensions: operators, strategies, differentiable functions, functions of local tensors, plans of modules."""
