"""Run a test on every rank of a world: simulated ranks, or warm processes over a real transport."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from hyper_parallel.pytest_plugin.capability import SkipReason, count_devices, skip_without
from hyper_parallel.pytest_plugin.fixtures import resolve
from hyper_parallel.pytest_plugin.marks import mesh_shape, seconds, world_sizes
from hyper_parallel.pytest_plugin.report import TITLES
from hyper_parallel.transport.frames import hide_file

__all__ = ["LAUNCHES", "TIMEOUT", "RankedOutcome", "RankedTest", "ranked_test", "require_transport", "run_ranked"]

hide_file(__file__)

LAUNCHES = ("simulated", "processes")
TIMEOUT = pytest.StashKey[float]()  # time limit in seconds, stored in the session
_USUAL = (
    "hyper_parallel.core.dtensor.factories",
    "hyper_parallel.core.tensor_parallel.parallelize",
    __name__,  # all three are imported before tests, since imports on a rank count towards the test's time limit
)


@dataclass(frozen=True)
class RankedTest:
    """The world that a ranked test runs on.

    Attributes:
        world_size: number of ranks.
        framework: ``torch`` or ``mindspore``.
        launch: ``simulated`` or ``processes``.
        device: ``cpu``, ``npu`` or ``cuda``.
        shape, names: shape and axis names of the mesh.
        timeout: seconds after which the ranks are ended.
    """

    world_size: int
    framework: str
    launch: str
    device: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    timeout: float

    def title(self) -> str:
        """Description for reports: ``3 simulated ranks of MindSpore``."""
        kind = {"simulated": "simulated", "processes": "real"}[self.launch]
        ranks = "rank" if self.world_size == 1 else "ranks"
        return f"{self.world_size} {kind} {ranks} of {TITLES[self.framework]}{self._where()}"

    def _where(self) -> str:
        """Return a text with the devices of the ranks; empty for the CPU."""
        if self.device == "cpu":
            return ""
        devices = 1 if self.launch == "simulated" else min(self.world_size, count_devices(self.device))
        shared = f" on {devices} {self.device} device{'' if devices == 1 else 's'}, shared"
        return shared if devices < self.world_size else f" on {self.device}"

    def properties(self) -> list[tuple[str, object]]:
        """Return the properties for JUnit reports."""
        return [
            ("world_size", self.world_size),
            ("framework", self.framework),
            ("launch", self.launch),
            ("device", self.device),
        ]


@dataclass
class RankedOutcome:
    """How a ranked test ended.

    Attributes:
        verdicts: ``passed``, ``skipped`` or ``xfailed`` with the reason, per rank; empty if the test failed.
        failure: the failure, or None.
        outputs, history: printed output and last collectives of each rank; empty if ranks were simulated.
    """

    verdicts: list[tuple[str, str]] = field(default_factory=list)
    failure: Exception | None = None
    outputs: list[str] = field(default_factory=list)
    history: list[list[str]] = field(default_factory=list)


def ranked_test(item: pytest.Function) -> RankedTest | None:
    """Return the world that ``item`` runs on, or None for an ordinary test."""
    sizes = world_sizes(item.get_closest_marker)
    if not sizes:
        return None
    params: dict[str, Any] = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    world_size = int(params.get("world_size", sizes[0]))
    mark = item.get_closest_marker("mesh")
    shape = mesh_shape(mark) or (world_size,)
    names = (mark.kwargs.get("names") if mark is not None else None) or _axis_names(len(shape))
    launch = item.get_closest_marker("launch")
    timeout = item.get_closest_marker("rank_timeout")
    return RankedTest(
        world_size,
        params["platform_name"],
        params.get("launch_name") or (launch.args[0] if launch is not None else item.config.getoption("hp_launch")),
        item.config.getoption("hp_device"),
        shape,
        tuple(names),
        seconds((*timeout.args, *timeout.kwargs.values())[0], "mark rank_timeout")
        if timeout is not None
        else item.config.stash[TIMEOUT],
    )


def _axis_names(count: int) -> tuple[str, ...]:
    """Return ``tp``, or ``dp`` and ``tp``, like the command line; numbered names for more axes."""
    usual = {1: ("tp",), 2: ("dp", "tp")}
    return usual.get(count) or tuple(f"axis{number}" for number in range(count))


def run_ranked(test: RankedTest, function: Callable[..., Any], arguments: dict[str, Any]) -> RankedOutcome:
    """Run ``function`` on every rank; every rank gets its own copy of the arguments."""
    if test.device != "cpu":
        _require_devices(test)
    elif test.launch == "processes":
        require_transport(test.framework)
    body = _packed(function, arguments)
    return (_run_simulated if test.launch == "simulated" else _run_processes)(test, body)


def _packed(function: Callable[..., Any], arguments: dict[str, Any]) -> bytes:
    """Return the packed test and its arguments; the test fails if a fixture's value cannot be copied to the ranks."""
    from hyper_parallel.transport.serialization import pack

    name, value = "", None
    try:
        for name, value in arguments.items():  # noqa: B007 - the error below names the one that cannot be pickled
            pack(value, function)
    except Exception as error:  # noqa: BLE001 - pickling raises what the value's class raises
        pytest.fail(
            f"fixture {name!r} is a {type(value).__name__}, which cannot be copied to the ranks "
            f"({error.__cause__ or error}); make it on the ranks: in the test, or in a fixture that asks for `rank`",
            pytrace=False,
        )
    return pack((function, arguments), function)


def _require_devices(test: RankedTest) -> None:
    devices = count_devices(test.device)
    if not devices:
        skip_without(SkipReason.NO_DEVICE, f"{test.world_size} ranks need {test.device} devices, there are none")
    if test.framework != "mindspore":
        return
    if test.launch == "processes" and devices < test.world_size:
        skip_without(
            SkipReason.TOO_FEW_DEVICES,
            f"{test.world_size} ranks of MindSpore need a device each, but {devices} are available",
        )


def require_transport(framework: str) -> None:
    """Skip the running test if this machine has no transport for rank processes of ``framework`` on CPU."""
    from hyper_parallel.transport.failures import NEEDS_GLOO

    if framework == "mindspore" and importlib.util.find_spec("torch") is None:
        skip_without(SkipReason.NO_TRANSPORT, NEEDS_GLOO)


def _run_simulated(test: RankedTest, body: bytes) -> RankedOutcome:
    from hyper_parallel.errors import RankFailedError
    from hyper_parallel.verify.simulate import simulate

    try:
        with _without_debug_log():
            verdicts = simulate(
                on_rank, test.world_size, test.framework, (test, body), timeout=test.timeout, device=test.device
            )
    except RankFailedError as failure:
        return RankedOutcome(failure=failure)
    return RankedOutcome(verdicts)


@contextmanager
def _without_debug_log() -> Iterator[None]:
    """Suppress PyTorch's DEBUG log of errors in collectives, so that it is not part of the report.

    The log is kept if ``TORCH_DISTRIBUTED_DEBUG`` is set.
    """
    logger = logging.getLogger("c10d-NullHandler-default")

    def above_debug(record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG

    if not os.environ.get("TORCH_DISTRIBUTED_DEBUG"):
        logger.addFilter(above_debug)
    try:
        yield
    finally:
        logger.removeFilter(above_debug)


def _run_processes(test: RankedTest, body: bytes) -> RankedOutcome:
    from hyper_parallel.transport.real.launched_processes import run_launched, warm_up
    from hyper_parallel.transport.serialization import pack

    for module in _USUAL:
        warm_up(test.framework, module)
    run = run_launched(pack((on_rank, (test, body))), test.world_size, test.framework, test.timeout, test.device)
    return RankedOutcome(run.results, run.failure, run.outputs, run.history)


def on_rank(test: RankedTest, body: bytes) -> tuple[str, str]:
    """Set up fixtures on this rank, run the test function and return ``passed``, ``skipped`` or ``xfailed``."""
    from hyper_parallel.platform.select import use_platform
    from hyper_parallel.transport.base import active_transport
    from hyper_parallel.transport.serialization import unpack

    transport = active_transport()
    number = transport.rank if transport is not None else 0
    known: dict[str, Any] = {"rank": lambda: number, "device": lambda: test.device, "mesh": lambda: _mesh(test)}
    with use_platform(test.framework), ExitStack() as stack:
        function, arguments = unpack(body)
        try:
            returned = function(**{name: resolve(value, known, stack) for name, value in arguments.items()})
        except pytest.skip.Exception as skipped:
            return "skipped", str(skipped)
        except pytest.xfail.Exception as failed:
            return "xfailed", str(failed)
    if inspect.isawaitable(returned) or inspect.isasyncgen(returned):
        if inspect.iscoroutine(returned):
            returned.close()  # it will not be awaited; the error below reports this
        msg = "the test function is asynchronous and was not run, since ranks do not await; use asyncio.run(...) inside"
        raise TypeError(msg)
    return "passed", ""


def _mesh(test: RankedTest) -> Any:
    from hyper_parallel import init_device_mesh

    return init_device_mesh(test.device, test.shape, mesh_dim_names=test.names)
