"""Operators of MindSpore by family, under the names of ``core/shard/rules``."""
