"""Rows of ``bench`` on MindSpore, compared with plain calls."""
