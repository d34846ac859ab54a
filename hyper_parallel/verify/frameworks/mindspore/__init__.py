"""MindSpore for the harness."""
