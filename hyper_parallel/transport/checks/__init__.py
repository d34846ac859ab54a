"""Collective consistency checks: one record of a call, one comparison, adapters."""
