"""Colour of verdicts on a terminal."""

import io
import sys

import pytest

from hyper_parallel.cli import main
from hyper_parallel.cli.colour import coloured


class Terminal(io.StringIO):
    """A terminal that records what is written to it."""

    def isatty(self):
        """Return True."""
        return True


def show_on_terminal(monkeypatch):
    """Make a terminal with colours stdout and stderr."""
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_the_first_verdict_of_a_line_has_a_colour(monkeypatch):
    """What is wrong is red, else what is right is green; other lines and words stay as they are."""
    show_on_terminal(monkeypatch)
    assert coloured("FAILED a: not equal\n1 of 2 equal, equal\nunequal") == (
        "\x1b[1;31mFAILED\x1b[0m a: not equal\n1 of 2 \x1b[32mequal\x1b[0m, equal\nunequal"
    )
    assert coloured("equal", io.StringIO()) == "equal"


@pytest.mark.parametrize("name, value", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour_where_it_is_not_wanted(monkeypatch, name, value):
    """``NO_COLOR`` and terminals without colours are respected."""
    show_on_terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    assert coloured("FAILED") == "FAILED"


def test_an_error_is_red_and_json_is_plain(monkeypatch, tmp_path):
    """On a terminal the word error is red; JSON has no colour there."""
    terminal = show_on_terminal(monkeypatch)
    assert main(["trace", str(tmp_path), "--json"]) == 2
    error, report = terminal.getvalue().splitlines()
    assert error.startswith("hyper-parallel: \x1b[1;31merror\x1b[0m: ")
    assert report.startswith('{"ok": false, "error": ')
    assert "\x1b" not in report


def test_a_pipe_gets_no_colour(capsys):
    """Text that is read by a program has no colour."""
    assert coloured("FAILED") == "FAILED"
