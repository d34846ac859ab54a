"""Ranks that are processes with communication between them: how they are started, and what their coordinator serves."""
