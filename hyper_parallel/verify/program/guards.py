"""Prevents a program from ending the verifying process, continuing in a fork of it, or handling its signals."""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from hyper_parallel.transport.simulated.rank_process import LEAVE_FORKED
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.launches import refused_launches, replace

__all__ = ["guarded"]

_GRACE_SECONDS = 2.0


@contextlib.contextmanager
def guarded(name: str) -> Iterator[None]:
    """Guard this process while a program runs in its threads.

    ``os._exit`` ends the rank like ``sys.exit``. A forked child may do separate work, such as a data loader's worker. A
    child that continues the program like a rank is ended, and so are children still alive at the end. Signal handlers
    are not installed, because only the main thread may install them. Timers that would raise a signal are not set. A
    signal that the program sends to its own process ends its rank. Calls that start ranks or RPC raise an error.

    Args:
        name: name of the program, for messages.

    Raises:
        InputError: (a ValueError) a forked child continued the program.
    """
    forks = _Forks()
    with contextlib.ExitStack() as stack:
        stack.callback(forks.end)
        stack.enter_context(refused_launches())
        replace(stack, os, "fork", lambda _: forks.fork)
        replace(stack, os, "_exit", lambda _: forks.leave)
        replace(stack, os, "abort", lambda _: lambda: forks.leave(128 + signal.SIGABRT))
        replace(stack, os, "kill", forks.kill)
        replace(stack, os, "killpg", functools.partial(forks.kill, others=(os.getpgid(0),)))
        replace(stack, signal, "raise_signal", forks.raise_signal)
        replace(stack, signal, "signal", _signal)
        replace(stack, signal, "alarm", functools.partial(_unset, previous=0))
        replace(stack, signal, "setitimer", functools.partial(_unset, previous=(0.0, 0.0)))
        yield
    if forks.continued:
        msg = (
            f"{name} forks at {forks.continued}, and the child goes on with the program as a rank of its own; end it "
            "there with os._exit(0), or start processes with subprocess or multiprocessing"
        )
        raise InputError(msg)


class _Forks:
    """The child processes that a program forks."""

    def __init__(self) -> None:
        self._fork, self._exit = os.fork, os._exit
        self._owner = os.getpid()
        self._read, self._write = os.pipe()
        self._children: list[int] = []
        self.continued = ""
        self._tell: Callable[..., Any] = self.leave

    def fork(self) -> int:
        """Fork the process, and watch the child if the program forks it rather than Python's multiprocessing."""
        site = _program_site()
        pid = self._fork()
        if pid:
            self._children.append(pid)
        elif site:
            self._watch(site)
        return pid

    def _watch(self, site: str) -> None:
        """End this child process as soon as it communicates as a rank, or returns to the simulation."""
        write, leave = self._write, self._exit

        def tell(*_: Any) -> NoReturn:
            os.write(write, f"{site}\n".encode())
            leave(0)

        from hyper_parallel.transport.simulated import threads as simulated_threads

        world: Any = simulated_threads._ThreadWorld  # noqa: SLF001 - only in the child, which has no other ranks
        world.pause = world._pass_on = tell  # noqa: SLF001 - as above
        LEAVE_FORKED.append(tell)  # for a rank that is a process
        self._tell = tell

    def leave(self, status: int) -> None:
        """End this process if it is a forked child, otherwise this thread's rank."""
        if os.getpid() != self._owner:
            self._exit(status)
        sys.exit(status)

    def kill(self, plain: Callable[[int, int], None], others: tuple[int, ...] = ()) -> Callable[[int, int], None]:
        """Return ``plain``, which sends a signal, but end the rank if its thread signals this process or ``others``."""

        def kill(process: int, number: int) -> None:
            if process in (self._owner, 0, -1, *others) and number and os.getpid() == self._owner and not _is_main():
                self.leave(128 + number)
            plain(process, number)

        return kill

    def raise_signal(self, plain: Callable[[int], None]) -> Callable[[int], None]:
        """Return ``plain``, which sends this process a signal, but ends the rank outside of the main thread."""
        return lambda number: plain(number) if _is_main() else self.leave(128 + number)

    def end(self) -> None:
        """End the remaining children and read their messages. A child that gets here itself has continued as a rank."""
        if os.getpid() != self._owner:
            self._tell()
        os.close(self._write)
        with _default_child_signal():
            self._end_children()
        self.continued = os.read(self._read, 1 << 12).decode().partition("\n")[0]
        os.close(self._read)

    def _end_children(self) -> None:
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in multiprocessing.active_children():
            if process.daemon and process.pid in self._children:
                process.terminate()  # as at the end of a Python process
        for pid in self._children:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                while not os.waitpid(pid, os.WNOHANG)[0]:
                    if time.monotonic() > deadline:
                        os.kill(pid, signal.SIGKILL)
                    time.sleep(0.01)


@contextlib.contextmanager
def _default_child_signal() -> Iterator[None]:
    """Remove the handler of SIGCHLD inside this context, because that of PyTorch's data loaders raises an error."""
    if not _is_main():
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


def _program_site() -> str:
    """Return ``file:line`` of the program's call of ``fork``; empty if Python's multiprocessing called ``fork``."""
    frame: Any = inspect.currentframe()
    frame = frame.f_back.f_back  # the caller of os.fork
    if "multiprocessing" in frame.f_code.co_filename:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _signal(plain: Callable[..., Any]) -> Callable[..., Any]:
    def install(number: int, handler: Any) -> Any:
        return plain(number, handler) if _is_main() else signal.getsignal(number)

    return install


def _unset(plain: Callable[..., Any], previous: Any) -> Callable[..., Any]:
    """Return a function that sets a timer by ``plain`` on the main thread; on other threads it does nothing."""

    def install(*arguments: Any) -> Any:
        return plain(*arguments) if _is_main() else previous

    return install


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
