"""The work handle that a collective of a simulated process group returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.errors import HandleError
from hyper_parallel.transport.checks.fingerprint import Site
from hyper_parallel.transport.host.torch.ops import bytes_of

__all__ = ["SimulatedWork", "require_unwritten"]

_Work: Any = dist.Work


class SimulatedWork(_Work):  # type: ignore[misc]  # its stubs lack half of its methods
    """A collective that was started; its outputs are written when it is waited for.

    PyTorch's C++ code calls :meth:`wait` and :meth:`get_future`.

    Args:
        finish: waits for the other members, writes the outputs and returns them; called once.
        ready: returns whether :attr:`finish` would return at once; it lets other ranks run before.
        source: returns the group rank that a message came from, after :attr:`finish`.
    """

    def __init__(
        self,
        finish: Callable[[], list[torch.Tensor]],
        ready: Callable[[], bool],
        source: Callable[[], int] | None = None,
    ) -> None:
        super().__init__()
        self._finish: Callable[[], list[torch.Tensor]] | None = finish
        self._ready = ready
        self._source = source
        self._outputs: list[torch.Tensor] = []
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the other members and write the outputs; the simulation detects hangs, so no timeout is needed.

        Raises:
            CollectiveMismatchError: members call different collectives, or a member never calls; every wait raises it.
        """
        del timeout
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._outputs = finish()
            except BaseException as error:
                self._error = error
                raise
        elif self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as :meth:`wait`: there are no streams."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as :meth:`wait`: there are no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once. If not, the other ranks run before this returns."""
        if self._finish is not None and self._ready():
            self.wait()
        return self._finish is None

    def is_success(self) -> bool:
        """Whether the collective is complete without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        """The error of a collective that failed, or None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The outputs, once complete."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """The group rank that a received message came from."""
        if self._source is None:
            msg = "source_rank: only a receive has a source"
            raise RuntimeError(msg)
        self.wait()
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A completed future of the outputs, because C++ code waits for it without letting other ranks run."""
        self.wait()
        if self._future is None:
            self._future = torch.futures.Future()
            self._future.set_result(self._outputs)
        return self._future


def require_unwritten(x: torch.Tensor, sent: bytes | torch.Tensor, site: Site) -> None:
    """Raise a HandleError if a tensor that is being sent has changed since the send started.

    Args:
        x: the tensor when the program waits for its send; a subclass is not read, since the receiver may reject its
            type.
        sent: a copy of it, or of its bytes, from when the send started.
        site: site of the send.
    """
    if type(x.detach()) is not torch.Tensor:
        return
    now, then = bytes_of(x.cpu()), bytes_of(sent.cpu()) if isinstance(sent, torch.Tensor) else sent
    equal = torch.equal(now, then) if isinstance(then, torch.Tensor) else now.numpy().tobytes() == then
    if not equal:
        raise HandleError(
            f"the tensor of the isend at {site} was written before its wait: the receiver may get the old values, the "
            "new ones or some of both; wait for the send first, or send a copy"
        )
