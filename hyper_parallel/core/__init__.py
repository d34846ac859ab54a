"""Distributed tensors, operator rules and parallel plans, shared by both frameworks."""
