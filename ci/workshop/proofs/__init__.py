"""The stored table of proofs, written from a run of ``hyper-parallel prove ops``."""
