"""Checks a function on distributed tensors: runs it on ranks and compares its results with those of one device."""
