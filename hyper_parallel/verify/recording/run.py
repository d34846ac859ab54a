"""``record_run``: records the program that runs inside a block, on every rank."""

from __future__ import annotations

import contextlib
import platform as machine
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel._release import __version__
from hyper_parallel.platform.contract.launcher_env import launched_rank
from hyper_parallel.platform.select import (
    FRAMEWORKS,
    chosen_framework,
    default_framework,
    installed_frameworks,
    platform_named,
)
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.record_log import RecordLimits, RecordLog, active_log, user_site
from hyper_parallel.verify.frameworks.contract.records import RecordingError
from hyper_parallel.verify.program.framework import imported_frameworks
from hyper_parallel.verify.recording.file import RankFile
from hyper_parallel.verify.recording.sink import FingerprintSink, RecordingSettings

if TYPE_CHECKING:
    from hyper_parallel.verify.frameworks.contract.harness import Fingerprints

__all__ = ["record_run"]

_NOTES = ("optimizers", "uncompiled")
_ENDED = "the end of the block"


@contextlib.contextmanager
def record_run(
    folder: str | Path,
    *,
    steps: int | None = None,
    every: int = 1,
    whole: Sequence[str] = (),
    limit: int = 1 << 30,
    platform: str | None = None,
) -> Iterator[None]:
    """Record the training inside the block, on every rank that runs it, for ``hyper-parallel verify diff``.

    Each rank appends fingerprints of its values to its own file. If a process is killed, only its last fingerprints are
    lost. Inside a verification, and in msrun's scheduler, nothing is recorded. The recorded values are inputs of
    models, outputs of modules, losses, gradients when the optimizer reads them, and parameters and buffers after each
    step. On PyTorch, collectives of ``torch.distributed`` that sum tensors are recorded as well.

    Args:
        folder: folder of the recording; it may exist, but must not have a recording of this rank.
        steps: number of optimizer steps after which recording stops, but not the program; with None, all steps are
            recorded.
        every: interval of recorded steps: the first step and each ``every``-th step after it are recorded.
        whole: patterns of names, such as ``layers.0.*``, of tensors to record with all elements.
        limit: largest size of a rank's file in bytes.
        platform: ``torch`` or ``mindspore``: the framework of the modules and optimizers. With None, the framework that
            ``use_platform`` or the environment has chosen, or else that is imported, by the file with the block if both
            are.

    Raises:
        RecordingError: (a ValueError) an argument is wrong, it is not clear which framework trains, or the folder
            cannot be written or has a recording.
    """
    launched = launched_rank()
    if active_log() is not None or (launched is not None and launched.scheduler):
        yield
        return
    most = None if steps is None else _at_least("steps", steps, 1)
    settings = RecordingSettings(most, _at_least("every", every, 1), tuple(whole), _at_least("limit", limit, 1 << 16))
    harness = harness_of(platform_named(_framework(platform)))
    log = RecordLog(0)

    def stop() -> None:
        log.paused = True

    fingerprints = harness.fingerprints()
    file = RankFile(Path(folder), settings.limit, lambda: _header(settings, fingerprints))
    sink = FingerprintSink(file, settings, fingerprints, stop)
    log.limits = RecordLimits(sink=sink, observe=True)
    if (launched is not None and launched.rank is not None) or fingerprints.world() is not None:
        file.write(())  # raises an error before training if the folder has a recording
    ended = _ENDED
    try:
        with harness.recording(log):
            yield
    except SystemExit as error:
        ended = _ENDED if error.code in (None, 0) else f"sys.exit({error.code!r})"
        raise
    except BaseException as error:
        ended = type(error).__name__
        raise
    finally:
        sink.flush()
        notes: dict[str, Any] = {name: log.notes[name] for name in _NOTES if name in log.notes}
        file.close({"by": ended, "steps": log.step, "left out": dict(sink.left_out), **notes})


def _framework(given: str | None) -> str:
    """Return the framework that trains in the block.

    Raises:
        RecordingError: the name is unknown, or both frameworks are imported and the file with the block does not import
            exactly one.
    """
    if given is not None and given not in FRAMEWORKS:
        msg = f"platform is {given!r}; it must be {' or '.join(FRAMEWORKS)}"
        raise RecordingError(msg)
    chosen = given or chosen_framework()
    imported = [name for name in FRAMEWORKS if name in sys.modules] or list(installed_frameworks())
    if chosen or len(imported) < len(FRAMEWORKS):
        return chosen or default_framework()
    file = user_site(contextlib.__file__).rpartition(":")[0]
    named = imported_frameworks(Path(file))
    if len(named) == 1:
        return named[0]
    which = "both" if named else "neither"
    msg = (
        f"PyTorch and MindSpore can both be imported here, and {file or 'the program'} imports {which}: say which one "
        'trains, as in record_run(folder, platform="torch")'
    )
    raise RecordingError(msg)


def _at_least(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        msg = f"{name} is {value!r}; it must be an integer of at least {least}"
        raise RecordingError(msg)
    return value


def _header(settings: RecordingSettings, fingerprints: Fingerprints) -> dict[str, Any]:
    launched = launched_rank()
    alone = (0, 1) if launched is None else (launched.rank or 0, launched.world_size)
    joined = fingerprints.world()
    rank, size = alone if joined is None else joined
    return {
        "version": __version__,
        "rank": rank,
        "world_size": size,
        **fingerprints.facts(),
        "python": machine.python_version(),
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": list(sys.argv),
        "steps": settings.steps,
        "every": settings.every,
        "whole": list(settings.whole),
        "limit": settings.limit,
    }
