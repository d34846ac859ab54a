"""Operators in a user's own file."""

from __future__ import annotations

import pytest

from hyper_parallel.verify.ops.user_operators import load_user_file

pytestmark = pytest.mark.platforms("torch")


def test_a_file_that_is_not_there():
    """A missing file is an error that names it."""
    with pytest.raises(ValueError, match="no such file") as caught:
        load_user_file("torch", "/nowhere/mine.py")
    assert str(caught.value) == "/nowhere/mine.py: no such file"
