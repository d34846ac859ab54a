"""Writes programs that reproduce wrong results of PyTorch's DTensor with PyTorch alone, and runs such programs.

To write a program, the PyTorch calls that an operator makes on plain tensors are recorded one by one.

``python -m hyper_parallel.verify.frameworks.torch.torch_dtensor_reproducer`` runs programs. Each line of standard input
is a JSON object ``{"programs", "world", "error"}``. The answer is a line with ``{"index", "printed"}`` of the first
program that fails with this error, or ``null``. Each program runs in ``world`` new processes that communicate over
gloo. PyTorch is imported once, and the processes are forked, so that every program starts from the same state.
"""

from __future__ import annotations

import cmath
import importlib
import json
import math
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode, resolve_name

from hyper_parallel.core.dtensor.placements import Partial

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.placements import Placement

__all__ = ["Draws", "Finding", "RecordedCall", "main", "program"]

MOST_LINES = 15
_HEAD = """\
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
dist.init_process_group("gloo")  # torchrun --nproc-per-node {world} THIS_FILE
mesh = dist.init_device_mesh("cpu", ({world},))"""


_OPERAND = re.compile(r"\bx(\d+)\b")
_LONG = 24  # number of elements; longer tensors are written as an expression that draws their values
_SEEDS = 64
_DRAWS = (
    "torch.randn({shape}, generator=torch.Generator().manual_seed({seed}), dtype=torch.float64)",
    "torch.randint(-4, 5, {shape}, generator=torch.Generator().manual_seed({seed}))",
    "torch.randint(-3, 4, {shape}, generator=torch.Generator().manual_seed({seed}))",
)
_BOUNDS = (None, (-4, 5), (-3, 4))
"""Bounds of expressions that draw long tensors: None for real numbers, then for integer operands and cotangents."""


class Draws:
    """Draws values as a generator of NumPy does; a short expression of PyTorch can draw those of long tensors again.

    Args:
        seed: seed of the values.
    """

    def __init__(self, *seed: int) -> None:
        self._short = np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._short, name)

    def standard_normal(self, shape: Any = ()) -> Any:
        """Draw normal numbers."""
        return self._long(0, shape) if _is_long(shape) else self._short.standard_normal(shape)

    def integers(self, low: int, high: int, shape: Any = ()) -> Any:
        """Draw integers from ``low`` to below ``high``."""
        if (low, high) in _BOUNDS and _is_long(shape):
            return self._long(_BOUNDS.index((low, high)), shape)
        return self._short.integers(low, high, shape)

    def _long(self, kind: int, shape: Sequence[int]) -> Any:
        return _drawn(kind, tuple(shape), int(self._short.integers(_SEEDS))).numpy()


def _is_long(shape: Any) -> bool:
    return math.prod(np.atleast_1d(shape).tolist()) > _LONG


def _drawn(kind: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return the values that an expression of kind ``kind``, an index of ``_BOUNDS``, draws with ``seed``."""
    generator, bounds = torch.Generator().manual_seed(seed), _BOUNDS[kind]
    if bounds is None:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(*bounds, shape, generator=generator)


class RecordedCall(NamedTuple):
    """A call of an operator, with its operands.

    Attributes:
        run: the operator as a function of its operands.
        arrays: the operands' values.
        shards: per operand, each rank's local array.
        placements: the operands' placements.
        requires_grad: which operands have a gradient.
    """

    run: Callable[[Sequence[Any]], Sequence[Any]]
    arrays: Sequence[Any]
    shards: Sequence[Sequence[Any]]
    placements: Sequence[Placement]
    requires_grad: Sequence[bool]


class Finding(NamedTuple):
    """The failure of a call.

    Attributes:
        call: the call.
        kind: ``wrong`` (a value), ``plain`` (a result is not a DTensor) or ``crash`` (an exception).
        gradient: whether the failure occurred in backward, or a gradient is wrong.
        which: index of the wrong output, or of the operand with the wrong gradient.
        seeds: cotangent per output; None for an output without one.
        right: the expected value.
    """

    call: RecordedCall
    kind: str
    gradient: bool = False
    which: int = 0
    seeds: Sequence[Any] = ()
    right: Any = None


class _Written(NamedTuple):
    """The source lines of a call, and its outputs with their variable names."""

    lines: list[str]
    outs: list[Any]
    names: list[str]


def program(finding: Finding, before: RecordedCall | None = None) -> str | None:
    """Return a program that reproduces a failure: it raises the exception, or prints the wrong value and the right one.

    Args:
        finding: the failure to reproduce.
        before: a call that the program makes first.

    Returns:
        The program, or None if it would be too long or cannot be expressed as source.
    """
    earlier = _Written([], [], []) if before is None else _written(before, "a", "b")
    shown = _written(finding.call, "x", "y")
    if earlier is None or shown is None:
        return None
    head = _HEAD.format(world=len(finding.call.shards[0]) if finding.call.shards else 2)
    begin = [*head.split("\n"), *earlier.lines, *shown.lines]
    for expected in (_computed(finding, shown), _literals(finding)):
        lines = [*begin, *_shown(finding, shown, expected)]
        if len(lines) <= MOST_LINES:
            return "\n".join(lines)
    return None


def _written(call: RecordedCall, operand: str, result: str) -> _Written | None:
    """Return a call as source; variables for operands and results are named ``operand`` or ``result`` and a number."""
    leaves = [
        torch.from_numpy(array).detach().requires_grad_(want)
        for array, want in zip(call.arrays, call.requires_grad, strict=True)
    ]
    recorder = _Recorder({id(leaf): f"{operand}{index}" for index, leaf in enumerate(leaves)}, result)
    with recorder:
        outs = list(call.run(leaves))
    names = [recorder.names.get(id(out), "") for out in outs]
    if recorder.unwritable or not all(names):
        return None
    operands = [f"{operand}{index} = {_operand(call, index)}" for index in range(len(leaves))]
    return _Written([*operands, *recorder.lines], outs, names)


def _operand(call: RecordedCall, index: int) -> str:
    """Return the source of an operand; to be short, partial values of a long tensor are written as multiples of it."""
    placement, leaf = call.placements[index], ".requires_grad_()" if call.requires_grad[index] else ""
    if isinstance(placement, Partial) and placement.reduce_op == "sum" and _is_long(call.arrays[index].shape):
        world = len(call.shards[index])
        parts = f"{_literal(torch.from_numpy(call.arrays[index]))} * {[3 - 2 * world, *[2] * (world - 1)]}"
        return f"DTensor.from_local({parts}[dist.get_rank()], mesh, [Partial()]){leaf}"
    if isinstance(placement, Partial):
        shards = ", ".join(_literal(torch.from_numpy(shard)) for shard in call.shards[index])
        return f"DTensor.from_local([{shards}][dist.get_rank()], mesh, [Partial({placement.reduce_op!r})]){leaf}"
    return f"distribute_tensor({_literal(torch.from_numpy(call.arrays[index]))}, mesh, [{placement!r}]){leaf}"


def _literals(finding: Finding) -> list[str]:
    return [] if finding.right is None else [f"expected = {_literal(torch.from_numpy(finding.right))}"]


def _computed(finding: Finding, call: _Written) -> list[str]:
    """Return lines with the expected value: for a long one, the same call on plain tensors; else a literal."""
    calls = [line.partition(" = ") for line in call.lines[len(finding.call.arrays) :]]
    if finding.right is None or not _is_long(finding.right.shape) or [target for target, _, _ in calls] != call.names:
        return _literals(finding)
    plain = calls[0][2]
    if not finding.gradient:
        gathered = _OPERAND.sub(r"x\1.full_tensor()", plain)
        return [f"expected = {gathered}"]
    operands = "".join(f"x{index}, " for index in range(len(finding.call.arrays))).rstrip()
    gathered, seed = _OPERAND.sub(r"plain[\1]", plain), _literal(torch.from_numpy(finding.seeds[0]))
    return [
        f"plain = [x.detach().full_tensor().requires_grad_(x.requires_grad) for x in ({operands})]",
        f"torch.autograd.backward({gathered}, {seed})",
        f"expected = plain[{finding.which}].grad",
    ]


def _shown(finding: Finding, call: _Written, expected: Sequence[str]) -> list[str]:
    """Return the lines after the call, which compute the result and check it."""
    lines = _backward(finding, call) if finding.gradient else []
    tensor = f"x{finding.which}.grad" if finding.gradient else call.names[finding.which]
    if finding.kind == "crash":
        return [*lines, f"print({tensor}.full_tensor())"]
    if finding.kind == "plain":
        return [*lines, f'assert isinstance({tensor}, DTensor), f"{{type({tensor})}} should be DTensor"']
    missing = f"torch.tensor([]) if {tensor} is None else " if finding.gradient else ""
    return [
        *lines,
        f"actual = {missing}{tensor}.full_tensor()",
        *expected,
        'print(f"{actual} should be {expected}")',
        "torch.testing.assert_close(actual, expected, equal_nan=True)",
    ]


def _backward(finding: Finding, call: _Written) -> list[str]:
    pairs = [
        (name, f"distribute_tensor({_literal(torch.from_numpy(seed))}, mesh, [Replicate()])")
        for name, out, seed in zip(call.names, call.outs, finding.seeds, strict=True)
        if seed is not None and out.requires_grad
    ]
    roots, seeds = (", ".join(names) for names in zip(*pairs, strict=True))
    return [f"torch.autograd.backward([{roots}], [{seeds}])"]


def _literal(tensor: torch.Tensor) -> str:
    return _expression(tensor) or _listed(tensor)


def _expression(tensor: torch.Tensor) -> str:
    """Return an expression that draws exactly this tensor; empty for a short tensor, or if there is no expression."""
    if not _is_long(tensor.shape) or tensor.dtype not in (torch.float64, torch.float32, torch.int64):
        return ""
    values = tensor.numpy().tobytes()
    for kind, text in enumerate(_DRAWS):
        for seed in range(_SEEDS):
            drawn = _drawn(kind, tuple(tensor.shape), seed)
            if drawn.to(tensor.dtype).numpy().tobytes() == values:
                shown = text.format(shape=tuple(tensor.shape), seed=seed)
                return shown if drawn.dtype == tensor.dtype else f"{shown}.to({tensor.dtype})"
    return ""


def _listed(tensor: torch.Tensor) -> str:
    values = repr(tensor.tolist()).replace("nan", "torch.nan").replace("inf", "torch.inf")
    shaped = f".reshape({tuple(tensor.shape)})" if 0 in tensor.shape else ""
    return f"torch.tensor({values}, dtype={tensor.dtype}){shaped}"


class _Recorder(TorchFunctionMode):
    """Writes the calls inside its context as source, one line per call."""

    def __init__(self, names: dict[int, str], result: str) -> None:
        super().__init__()
        self.names, self.result = names, result
        self.lines: list[str] = []
        self.unwritable = False
        self._kept: list[Any] = []  # ids are unique only among live objects

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the call, and record it."""
        del types
        named = kwargs or {}
        out = func(*args, **named)
        self._kept.append(out)
        texts = [self._source(arg) for arg in args]
        texts += [f"{name}={self._source(value)}" for name, value in named.items()]
        several = isinstance(out, (list, tuple)) and all(isinstance(item, torch.Tensor) for item in out)
        if several or isinstance(out, torch.Tensor):
            results = list(out) if several else [out]
            for result in results:
                self.names.setdefault(id(result), f"{self.result}{len(self.names)}")
            targets = ", ".join(self.names[id(result)] for result in results)
            targets += "," if several and len(results) == 1 else ""
            self.lines.append(f"{targets} = {self._called(func, texts)}")
        return out

    def _called(self, func: Callable[..., Any], texts: list[str]) -> str:
        name = resolve_name(func)
        if name is None:
            self.unwritable = True
            return ""
        if name.endswith(".__get__"):
            return f"{texts[0]}.{name.split('.')[-2]}"
        if name.startswith("torch.Tensor."):
            return f"{texts[0]}.{name.rpartition('.')[2]}({', '.join(texts[1:])})"
        return f"{'torch.ops.' if name.startswith('aten.') else ''}{name}({', '.join(texts)})"

    def _source(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self.names.get(id(value)) or _literal(value.detach())
        if isinstance(value, (list, tuple)):
            inner = "".join(f"{self._source(item)}, " for item in value)
            return f"[{inner[:-2]}]" if isinstance(value, list) else f"({inner[:-1]})"
        text = _number(value) if isinstance(value, (float, complex)) else repr(value)
        self.unwritable = self.unwritable or not isinstance(value, _WRITABLE)
        return "..." if value is ... else text


_WRITABLE = (
    slice, type(None), type(...), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
)  # fmt: skip


def _number(value: complex) -> str:
    finite = cmath.isfinite(value)
    return repr(value) if finite else f"{type(value).__name__}({str(value)!r})"


# -- running programs --------------------------------------------------------------------------------------------------

_SECONDS = 60.0
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")  # PyTorch writes this before each line of a traceback
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")  # the last line of a traceback
_SHARED = ("torch", "torch.distributed.tensor", "torch._dynamo")  # imported by every program


def main() -> None:
    """Answer each JSON line of standard input with one line, in the format that the module describes."""
    for name in _SHARED:
        importlib.import_module(name)
    for line in sys.stdin:
        finding = json.loads(line)
        shown = None
        for index, text in enumerate(finding["programs"]):
            printed = _printed(text, finding["world"], finding["error"])
            if printed is not None:
                shown = {"index": index, "printed": printed}
                break
        sys.stdout.write(json.dumps(shown) + "\n")
        sys.stdout.flush()


def _printed(text: str, world: int, error: str) -> str | None:
    """Run a program; return the wrong value or error that it prints if it fails with ``error`` on a rank, else None.

    An empty ``error`` stands for ranks that call different collectives: then any failure counts, and also a deadlock.
    """
    with tempfile.TemporaryDirectory() as folder:
        code = compile(text, "reproducer.py", "exec")
        port = _free_port()
        hangs = not _wait([_forked(code, rank, port, world, Path(folder)) for rank in range(world)])
        outputs = [
            (Path(folder) / f"{rank}.out").read_text(encoding="utf-8", errors="replace") for rank in range(world)
        ]
        errors = [(Path(folder) / f"{rank}.err").read_text(encoding="utf-8", errors="replace") for rank in range(world)]
    lines = [_RANK_PREFIX.sub("", line) for text in errors for line in text.split("\n")]
    raised = [line for line in lines if (line.partition(":")[0] == error if error else _ERROR.match(line))]
    if not raised:
        return "nothing: its ranks wait for each other" if hangs and not error else None
    return next((" ".join(out.split()) for out in outputs if " should be " in out), raised[0])


def _forked(code: CodeType, rank: int, port: int, world: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / f"{rank}.{stream}", os.O_CREAT | os.O_WRONLY, 0o600), number)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    status = 0
    try:
        exec(code, {"__name__": "__main__"})  # noqa: S102 - our own program
    except BaseException:  # noqa: BLE001 - the program is expected to fail
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait(children: list[int]) -> bool:
    """Wait until all processes have ended; return False if some had to be killed because they did not end."""
    until = time.monotonic() + _SECONDS
    left = set(children)
    failed = False
    while left:
        for child in list(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                left.discard(child)
                failed = failed or status != 0
        if left and failed:  # the remaining ranks may wait for the failed one until gloo's timeout
            until = min(until, time.monotonic() + _GRACE_SECONDS)
            failed = False
        if left and time.monotonic() > until:
            for child in left:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return False
        time.sleep(0.02)
    return True


_GRACE_SECONDS = 2.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
