"""The line on stderr that says what runs."""

import io
import sys

import pytest

from hyper_parallel.cli.progress import Progress


class Terminal(io.StringIO):
    """A terminal that remembers what it was told."""

    def isatty(self):
        """It is one."""
        return True


def test_a_terminal_sees_a_bar(monkeypatch):
    """The bar fills with finished parts, names the running one, and is cleared before anything else is printed."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = Progress(4)
    progress.start("a")
    progress.finish()
    progress.start("b")
    assert sys.stderr.getvalue().split("\r\x1b[K") == ["", f"[{'.' * 24}] 0/4 a", "", f"[{'#' * 6}{'.' * 18}] 1/4 b"]


def test_parts_that_follow_each_other(monkeypatch):
    """Starting the next part finishes the one before, and only that."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = Progress(2)
    progress.next("a")
    assert progress.done == 0
    progress.next("b")
    progress.clear()
    assert progress.done == 1
    assert sys.stderr.getvalue().endswith("1/2 b\r\x1b[K")


@pytest.mark.parametrize("call", ["start", "next"])
def test_what_is_no_terminal_sees_nothing(monkeypatch, call):
    """A file or a pipe gets no bar."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = Progress(1)
    getattr(progress, call)("a")
    progress.finish()
    assert sys.stderr.getvalue() == ""
