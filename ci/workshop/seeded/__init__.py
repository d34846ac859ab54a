"""Bugs seeded in models, and in what ``hyper-parallel reduce`` makes of them."""
