"""The platform contract, implemented by MindSpore."""
