"""Simulated ranks on one machine, and the coordinator that matches their calls."""
