"""Documented bugs as programs in plain PyTorch; nothing imports them, and the corpus runs them like users' code."""
