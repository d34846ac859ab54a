"""Rows of ``bench`` on MindSpore, beside plain calls."""
