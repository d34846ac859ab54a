"""The default time limit of ranks."""

import pytest

from hyper_parallel.transport.timeouts import rank_seconds


@pytest.mark.parametrize("text, seconds", [(None, 60.0), ("", 60.0), ("7.5", 7.5)])
def test_the_variable_or_a_minute(monkeypatch, text, seconds):
    """The limit is a minute unless the environment variable sets another."""
    monkeypatch.delenv("HP_RANK_TIMEOUT", raising=False)
    if text is not None:
        monkeypatch.setenv("HP_RANK_TIMEOUT", text)
    assert rank_seconds() == seconds


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_no_time_is_refused(monkeypatch, text):
    """A limit that is not a positive number is refused: ranks would end before they start, or never."""
    monkeypatch.setenv("HP_RANK_TIMEOUT", text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is compared
        rank_seconds()
    assert str(caught.value) == f"HP_RANK_TIMEOUT={text}: expected a positive number of seconds"
