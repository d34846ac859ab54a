"""MindSpore behind the platform contract."""
