"""A model, its training and a plan, verified as a program: `verify model`."""
