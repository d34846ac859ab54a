"""Recordings of runs: fingerprints of what every rank computes, written while it trains."""
