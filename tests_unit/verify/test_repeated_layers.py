"""Rows of repeated layers are folded where they are the same."""

from __future__ import annotations

from hyper_parallel.verify.repeated_layers import folded


def paths(*rows):
    """Return paths and numbers of rows after folding rows of path and key."""
    return [(fold.path, len(fold.rows)) for fold in folded((path, key, path) for path, key in rows)]


def test_equal_layers_are_one_row():
    """Layers with the same key are one row in the place of the first, with spans of their numbers."""
    rows = [("a.0.w", 1), ("a.0.b", 2), ("a.1.w", 1), ("a.1.b", 2), ("a.2.w", 1), ("a.5.w", 1), ("head", 1), ("", 1)]
    assert paths(*rows) == [("a.0-2,5.w", 4), ("a.0-1.b", 2), ("head", 1), ("", 1)]


def test_rows_that_differ_stay():
    """Another key, or another name, is another row."""
    assert paths(("a.0.w", 1), ("a.1.w", 2), ("b.0.w", 1)) == [("a.0.w", 1), ("a.1.w", 1), ("b.0.w", 1)]


def test_two_numbers_are_folded_only_if_all_pairs_are_there():
    """Experts of layers are one row if every layer has them; else a span would name rows that do not exist."""
    every = [(f"layers.{layer}.experts.{expert}", 1) for layer in range(2) for expert in range(3)]
    assert paths(*every) == [("layers.0-1.experts.0-2", 6)]
    assert paths(("a.0.b.0", 1), ("a.1.b.1", 1)) == [("a.0.b.0", 1), ("a.1.b.1", 1)]
