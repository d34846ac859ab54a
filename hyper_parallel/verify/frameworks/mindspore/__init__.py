"""Implementation of the harness interface for MindSpore."""
