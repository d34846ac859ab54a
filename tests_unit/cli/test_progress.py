"""The progress bar on stderr."""

import io
import re
import sys
import threading

import pytest

from hyper_parallel.cli.progress import Progress


@pytest.fixture(autouse=True)
def lines(monkeypatch):
    """Lines of progress, which other tests switch off."""
    monkeypatch.setenv("HP_PROGRESS_LINES", "1")


class Terminal(io.StringIO):
    """A terminal that records what is written to it."""

    def isatty(self):
        """Return True."""
        return True


def frames():
    """Return the text of each redraw of the bar, without colours and the bar itself."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", sys.stderr.getvalue())
    return [frame.strip(" ╸╺━") for frame in re.split(r"[\r\n]+", text) if frame.strip()]


def show_on_terminal(monkeypatch):
    """Make stderr a terminal of 80 columns."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return sys.stderr


def test_a_terminal_shows_finished_parts_and_the_running_one(monkeypatch):
    """The bar counts finished parts and names the running one; square brackets in a name are shown unchanged."""
    show_on_terminal(monkeypatch)
    progress = Progress(4)
    progress.start("a")
    progress.finish()
    progress.start("b [red]")
    progress.clear()
    shown = frames()
    assert re.search(r"0/4 \S+ a$", shown[0])
    assert re.search(r"1/4 \S+ b \[red\]$", shown[-1])


def test_the_bar_is_cleared_and_the_cursor_comes_back(monkeypatch):
    """After `clear`, the cursor is visible and the last line of the terminal is empty."""
    terminal = show_on_terminal(monkeypatch)
    progress = Progress(1)
    progress.start("a")
    progress.finish()
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")


def test_the_next_part_finishes_the_previous_one(monkeypatch):
    """Starting the next part counts only the previous one as finished."""
    show_on_terminal(monkeypatch)
    progress = Progress(2)
    progress.next("a")
    assert progress.done == 0
    progress.next("b")
    progress.clear()
    assert progress.done == 1
    assert re.search(r"1/2 \S+ b$", frames()[-1])


@pytest.mark.parametrize("call", ["start", "next"])
def test_a_pipe_gets_no_bar(monkeypatch, call):
    """A command that ends within two seconds writes nothing to a file or a pipe."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = Progress(1, clock=lambda: 5.0)
    getattr(progress, call)("a")
    progress.finish()
    assert sys.stderr.getvalue() == ""


def test_a_pipe_gets_a_line_now_and_then(monkeypatch):
    """Without a terminal, a line comes after two seconds and then every ten, with the time left at the pace so far."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = [100.0]
    progress = Progress(200, clock=lambda: now[0])
    for seconds, part in ((1.9, "a"), (2.0, "b"), (11.9, "c"), (12.0, "d"), (198.0, "e")):
        now[0] = 100.0 + seconds
        progress.start(part)
        progress.done = {"a": 0, "b": 1, "c": 4, "d": 198, "e": 199}[part]
    assert sys.stderr.getvalue().splitlines() == [
        "0 of 200 done after 2 s: b",
        "4 of 200 done, about 10 min left: d",
        "198 of 200 done, about 2 s left: e",
    ]


def test_lines_can_be_switched_off(monkeypatch):
    """HP_PROGRESS_LINES=0 writes none, however long a command takes."""
    monkeypatch.setenv("HP_PROGRESS_LINES", "0")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = [0.0]
    progress = Progress(2, clock=lambda: now[0])
    now[0] = 1e9
    progress.next("a")
    assert sys.stderr.getvalue() == ""


def test_a_line_without_a_total_tells_the_count(monkeypatch):
    """Where the number of parts is not known, no time left is reported."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = [0.0]
    progress = Progress(0, clock=lambda: now[0])
    progress.done, now[0] = 7, 3.0
    progress.start("no findings")
    assert sys.stderr.getvalue() == "7 done: no findings\n"


def test_a_long_part_is_shown_again(monkeypatch):
    """Inside `ticking` the running part gets a line now and then by itself; after `clear` there is none."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now, read = [0.0], threading.Event()

    def clock():
        read.set()
        return now[0]

    progress = Progress(1, clock)
    with progress.ticking(0.001):
        progress.start("the only one")
        now[0] = 31.0
        read.clear()
        assert read.wait(60)
        progress.clear()
        shown = sys.stderr.getvalue()
        now[0] = 90.0
        assert progress._part is None
    assert shown == sys.stderr.getvalue() == "0 of 1 done after 31 s: the only one\n"


def test_nothing_is_shown_before_a_part_starts(monkeypatch):
    """`ticking` shows nothing as long as no part runs."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress, looked = Progress(1, lambda: 99.0), threading.Event()

    class Stop:
        """An event that is set at the second look."""

        def wait(self, _):
            """Return False once, and then True."""
            before = looked.is_set()
            looked.set()
            return before

    progress._show_again(Stop(), 1.0)
    assert sys.stderr.getvalue() == ""
