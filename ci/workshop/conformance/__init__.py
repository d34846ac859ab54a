"""Checks of the platform contract: every function and its documented errors."""
