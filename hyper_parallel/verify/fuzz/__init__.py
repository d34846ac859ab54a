"""Fuzzing: random programs on DTensors are compared with the same programs on one device."""
