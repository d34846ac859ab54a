"""Declares nothing to check."""
