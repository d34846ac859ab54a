"""One rank of the mutation suite."""

from __future__ import annotations

import pytest

from workshop.mutation.suite.fixture import never, raises


def test_the_fixture_refuses_what_must_not_happen():
    """A scenario that expects an error fails without that error, and with a call that must not be made."""
    with pytest.raises(AssertionError, match="ValueError was expected"):
        raises(ValueError, lambda: None)
    assert raises(AssertionError, never) == "the spelling cannot run on locals"
