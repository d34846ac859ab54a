"""Scaled-down configurations: the smallest model with the structure of a large one."""
