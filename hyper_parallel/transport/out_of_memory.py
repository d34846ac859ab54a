"""Recognises errors of memory that ran out when ranks are started, or of a full disk, and adds advice to them."""

from __future__ import annotations

import errno
import re
import resource
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["advice", "is_out_of_memory", "starting"]

# Messages of Python, the dynamic loader, the C library, threads, C++ and the frameworks' allocators.
_SIGNS = re.compile(
    r"\bMemoryError\b|Cannot allocate memory|failed to map segment|can't start new thread|bad_alloc|not enough memory"
)
# What PyTorch's writer of checkpoints says on a full disk, in place of the system's error.
_CUT_SHORT = re.compile(r"inline_container\.cc:\d+\] \. unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing")
_ERRNOS = (errno.ENOMEM, errno.EAGAIN)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that there was no memory, or no room for another process or thread."""
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    return bool(_SIGNS.search(f"{type(error).__name__}: {error}"))


def advice(report: str) -> str:
    """A line with the facts and the fix if ``report`` shows that memory or a disk ran out; else an empty string."""
    if _CUT_SHORT.search(report):
        return (
            "PyTorch could not write all of a checkpoint's file: is the disk full? An earlier checkpoint is unchanged"
        )
    return f"there is no memory for so many ranks: {_facts_and_fix()}" if _SIGNS.search(report) else ""


def _facts_and_fix() -> str:
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    available = re.search(r"^MemAvailable: +(\d+) kB$", meminfo, re.MULTILINE)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    facts = [
        f"{int(available[1]) // 1024} MiB available now" if available else "",
        f"{limit >> 20} MiB allowed for a process (ulimit -v)" if limit != resource.RLIM_INFINITY else "",
    ]
    fix = "Run fewer at a time: a smaller world, a smaller model, or fewer pytest workers (-n)"
    return f"{', '.join(filter(None, facts))}. {fix}"


@contextmanager
def starting(what: str) -> Iterator[None]:
    """Turn out-of-memory errors of starting a process or thread inside into an error with advice.

    Args:
        what: what is started, for the message.

    Raises:
        RankFailedError: there is no room for another one, or the fork server has ended.
    """
    try:
        yield
    except (EOFError, ConnectionError) as error:
        reason = "the process that forks ranks has ended, and stderr has the reason. If memory ran out"
        msg = f"{what} could not be started: {reason}: {_facts_and_fix()}"
        raise RankFailedError(msg) from error
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        msg = f"{what} could not be started: {reason}\nthere is no memory for so many ranks: {_facts_and_fix()}"
        raise RankFailedError(msg) from error
