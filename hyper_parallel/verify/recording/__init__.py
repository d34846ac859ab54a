"""Recordings of runs: fingerprints of the values that every rank computes, written during training."""
