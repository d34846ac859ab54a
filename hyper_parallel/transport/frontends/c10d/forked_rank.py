"""The process of a simulated rank of PyTorch: it runs one task and communicates through its parent."""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.transport.checks.fingerprint import MessageFingerprint, call_site
from hyper_parallel.transport.checks.flight_recorder import RankFlight
from hyper_parallel.transport.checks.torch_distributed import LIBRARY_FILES
from hyper_parallel.transport.frames import trace
from hyper_parallel.transport.frontends.c10d.comm_debug import count_of_transport
from hyper_parallel.transport.frontends.c10d.installation import INSTALLATION
from hyper_parallel.transport.frontends.c10d.rank_groups import RankGroups, enter_rank
from hyper_parallel.transport.frontends.c10d.shared_payloads import pack, unpack
from hyper_parallel.transport.host.torch.ops import TorchOps
from hyper_parallel.transport.processes import SharedFile, torchrun_environment
from hyper_parallel.transport.serialization import pack_error
from hyper_parallel.transport.simulated.endpoint import Contribution, Resumption
from hyper_parallel.transport.simulated.rank_process import (
    LEAVE_FORKED,
    RankReport,
    RankTask,
    end_by_sigterm,
    leave_after,
    run_rank,
)
from hyper_parallel.transport.simulated.transport import SimulatedTransport
from hyper_parallel.transport.simulated.warm_packages import ASKED

__all__ = ["PORT", "ForkedTask", "PostedElsewhere", "rank_distributed", "serve"]

PORT = "29500"
_TIMEOUT = timedelta(seconds=300)
_Store: Any = Store


@dataclass(frozen=True)
class ForkedTask:
    """The one task of a rank process.

    Attributes:
        task: the function and its arguments, pickled as for every kind of rank process.
        state: state of the parent's generators, switches and environment.
        threads: number of threads of an operator.
        folder: folder for the memory of large tensors.
    """

    task: RankTask
    state: Any
    threads: int
    folder: str


class PostedElsewhere:
    """A send or receive that is posted in the parent process.

    Args:
        endpoint: endpoint of the rank that posted it.
        number: number of the send or receive in the parent.
        message: fingerprint of the message; the source of a receive from any rank is known once it is matched.
    """

    def __init__(self, endpoint: PipeToParent, number: int, message: MessageFingerprint) -> None:
        self.number, self.message = number, message
        self._endpoint = endpoint

    @property
    def matched(self) -> bool:
        """Whether the other side of the message was posted."""
        return bool(self._endpoint.ask("is_matched", self.number))


class PipeToParent:
    """The endpoint of a rank whose coordinator is in the parent; its methods are documented in ``ThreadEndpoint``.

    Args:
        line: connection to the parent.
        folder: folder for the memory of large tensors.

    Attributes:
        refused: error of a call that was rejected in another thread of the rank; the rank ends with this error.
    """

    own_process = True

    def __init__(self, line: Connection, folder: str) -> None:
        self.refused: Exception | None = None
        self._line, self._folder = line, folder
        self._asking, self._sending = threading.Lock(), threading.Lock()
        self._process = os.getpid()

    def exchange(self, contribution: Contribution) -> list[Any]:
        """See :class:`Endpoint`."""
        return [unpack(part) for part in self.ask("exchange", self._packed(contribution))]

    def start(self, contribution: Contribution) -> None:
        """See :class:`Endpoint`."""
        self.ask("start", self._packed(contribution))

    def wait(self, ticket: int) -> list[Any]:
        """See :class:`Endpoint`."""
        return [unpack(part) for part in self.ask("wait", ticket)]

    def ready(self, ticket: int) -> bool:
        """See ``ThreadEndpoint``."""
        return bool(self.ask("ready", ticket))

    def send(self, message: MessageFingerprint, payload: Any) -> None:
        """See :class:`Endpoint`."""
        self.ask("send", (message, pack(payload, self._folder)))

    def receive(self, posted: MessageFingerprint) -> Any:
        """See :class:`Endpoint`."""
        return unpack(self.ask("receive", posted))

    def post(self, message: MessageFingerprint, payload: Any = None, *, sending: bool) -> PostedElsewhere:
        """See ``ThreadEndpoint``."""
        number = self.ask("post", (message, pack(payload, self._folder), sending))
        return PostedElsewhere(self, number, message)

    def matched(self, posted: PostedElsewhere) -> Any:
        """See ``ThreadEndpoint``."""
        payload, posted.message = self.ask("matched", posted.number)
        return None if payload is None else unpack(payload)

    def give_way(self) -> None:
        """See ``ThreadEndpoint``."""
        self.ask("give_way", None)

    def _packed(self, contribution: Contribution) -> Contribution:
        parts: dict[int, Any] = {}
        for payload in contribution.payloads:
            if id(payload) not in parts:
                parts[id(payload)] = pack(payload, self._folder)
        payloads = [parts[id(payload)] for payload in contribution.payloads]
        return Contribution(contribution.fingerprint, payloads, contribution.ticket, contribution.awaited)

    def ask(self, kind: str, content: Any) -> Any:
        """Send the parent a request and return its answer; other ranks may run before it answers.

        Raises:
            UnsupportedOnBackend: another thread of this rank asks at the same time.
        """
        if os.getpid() != self._process:
            LEAVE_FORKED[-1]()
        if not self._asking.acquire(blocking=False):
            msg = (
                f"thread {threading.current_thread().name!r} communicates while another thread of its simulated rank "
                "does: their order is not defined; communicate in one thread (dcp.save instead of dcp.async_save)"
            )
            self.refused = UnsupportedOnBackend(msg)
            raise self.refused
        try:
            self.tell(kind, content)
            resumption: Resumption = self._line.recv()
        finally:
            self._asking.release()
        if resumption.error is not None:
            raise resumption.error
        return resumption.value

    def tell(self, kind: str, content: Any) -> None:
        """Send the parent a message that has no answer."""
        with self._sending:
            self._line.send((kind, content))


class StoreElsewhere(_Store):  # type: ignore[misc]  # its stubs lack its constructor
    """The world's key-value store, which is in the parent."""

    def __init__(self, endpoint: PipeToParent) -> None:
        super().__init__()
        self._endpoint = endpoint

    def _call(self, name: str, *args: Any) -> Any:
        return self._endpoint.ask("store", (name, args, call_site(*LIBRARY_FILES)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until every key is set."""
        del timeout
        self._call("wait", list(keys))

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing: the simulation detects hangs without a time limit."""

    @property
    def timeout(self) -> timedelta:
        """PyTorch's default; not used here."""
        return _TIMEOUT

    def has_extended_api(self) -> bool:
        """Whether the store has append, multi_get and multi_set."""
        return True

    hasExtendedApi = has_extended_api


def _method(name: str) -> Callable[..., Any]:
    return lambda store, *args: store._call(name, *args)  # noqa: SLF001 - a method of it


for _name, _others in {
    "set": (), "get": (), "check": (), "add": (), "append": (), "compare_set": ("compareSet",),
    "delete_key": ("deleteKey",), "num_keys": ("getNumKeys",), "list_keys": ("listKeys",),
    "multi_get": ("multiGet",), "multi_set": ("multiSet",),
}.items():  # fmt: skip
    for _alias in (_name, *_others):
        setattr(StoreElsewhere, _alias, _method(_name))


class _Printed:
    """A text stream whose text the parent prints."""

    encoding, errors = "utf-8", "strict"

    def __init__(self, endpoint: PipeToParent, name: str) -> None:
        self._endpoint, self._name = endpoint, name

    def write(self, text: str) -> int:
        """Print ``text``."""
        if os.getpid() == self._endpoint._process:  # noqa: SLF001 - its own
            self._endpoint.tell("print", (self._name, text))
        else:
            os.write(self.fileno(), text.encode())
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def isatty(self) -> bool:
        """Return False: the parent prints the text."""
        return False

    def fileno(self) -> int:
        """Return the number of the parent's standard error."""
        return 2

    def writable(self) -> bool:
        """Return True."""
        return True

    @property
    def buffer(self) -> Any:
        """The binary stream."""
        return cast("Any", sys.__stderr__).buffer


def serve(line: Connection, stack_path: str, output: SharedFile, parent: int) -> None:
    """Run a task for the process ``parent`` and exit, at once if the parent ends; never returns."""
    multiprocessing.set_start_method(None, force=True)  # the start method of the server would import the program again
    os.setsid()  # only the parent gets a Ctrl-C of the terminal; it ends its ranks
    end_by_sigterm()
    for number in (1, 2):
        os.dup2(output.number, number)
    # The rank watches ``parent``, which started the run, not the fork server: that lives as long as any of its ranks.
    threading.Thread(target=RankFlight(0, 1, parent).leave_with_parent, args=(os._exit,), daemon=True).start()
    with Path(stack_path).open("w", encoding="utf-8") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        leave_after(lambda: _serve(line), stack, os._exit)


def _serve(line: Connection) -> None:
    line.send(("ready", ASKED))
    given: ForkedTask = line.recv()
    process, task = os.getpid(), given.task
    sys.path[:] = task.path
    os.chdir(task.folder)
    torch.set_num_threads(given.threads)
    TorchOps().restore_state(given.state)
    endpoint = PipeToParent(line, given.folder)
    sys.stdout, sys.stderr = cast("Any", _Printed(endpoint, "stdout")), cast("Any", _Printed(endpoint, "stderr"))
    transport = SimulatedTransport(task.rank, task.world_size, TorchOps(), endpoint)
    transport.count = count_of_transport
    with INSTALLATION.run(threads=False), INSTALLATION.rank():
        groups = RankGroups(transport, cast("Store", StoreElsewhere(endpoint)))
        with rank_distributed(groups), _threads_are_this_rank():
            report = run_rank(task, transport)
    refused = transport.refused or endpoint.refused
    if report.how == "returned" and refused is not None:
        report = RankReport("raised", pack_error(refused), trace(refused))
    if os.getpid() != process:
        LEAVE_FORKED[-1]()
    endpoint.tell("report", report)
    line.recv()  # the parent closes it


@contextmanager
def _threads_are_this_rank() -> Iterator[None]:
    """Inside this context, new threads inherit the context variables (transport, groups, platform) of their starter."""
    plain = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        thread.run = functools.partial(copy_context().run, thread.run)  # type: ignore[method-assign]
        plain(thread)

    threading.Thread.start = start  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        threading.Thread.start = plain  # type: ignore[method-assign]


@contextmanager
def rank_distributed(groups: RankGroups) -> Iterator[None]:
    """Inside this context, this thread is the rank of ``groups``; it starts with torchrun's environment."""
    os.environ.update(torchrun_environment(groups.transport.rank, groups.transport.world_size, PORT))
    enter_rank(groups)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        groups.close()
        enter_rank(None)
