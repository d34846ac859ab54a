"""Proves rules of operators for all sizes, and plans of models for given sizes."""
