"""The text that the bundled scenarios train on."""

import numpy as np
import pytest

from hyper_parallel.verify.scenarios import BEGIN, text_batches


def test_labels_are_the_tokens_that_follow():
    """A label is the next token, a sequence starts with BEGIN, and the text is Python's own."""
    batches = text_batches(2, 3, 11)
    assert len(batches) == 2
    for tokens, labels in batches:
        assert tokens.shape == labels.shape == (3, 11)
        assert tokens.dtype == labels.dtype == np.int64
        np.testing.assert_array_equal(tokens[:, 1:], labels[:, :-1])
        assert (tokens[:, 0] == BEGIN).all()
        assert 0 <= labels.min() <= labels.max() < 256
    first = bytes(batches[0][1].astype(np.uint8).reshape(-1))
    assert first.startswith(b's = """Gur Mra')


def test_equal_every_time_and_never_overlapping():
    """Two calls give the same batches, and no sequence occurs twice."""
    first, second = text_batches(3, 3, 13), text_batches(3, 3, 13)
    np.testing.assert_array_equal(np.array(first), np.array(second))
    rows = {tuple(row) for _, labels in first for row in labels.tolist()}
    assert len(rows) == 9


def test_too_much_text():
    """Asking for more text than exists is an error with the available length."""
    with pytest.raises(ValueError, match=r"1 batches of 1000 x 1000 tokens need 1000000 bytes, the text has \d+"):
        text_batches(1, 1000, 1000)
