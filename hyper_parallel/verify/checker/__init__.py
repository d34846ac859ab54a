"""One checker of placements: run a function on ranks, gather, compare with one device."""
