"""Sweep the dtypes of MindSpore's public functions and methods: does a DTensor take those of a plain tensor?

Each expression of the operator sweep (``sweep.py``) runs on plain tensors and on DTensors of one rank, with every dtype
of its first two tensors, or in a cell of mixed precision. ``test_promotion.py`` runs all, and a few in each run.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import HyperParallelError, RankFailedError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

__all__ = ["BAD", "DTYPES", "Pair", "Trial", "expressions", "isolated", "mixed", "pairs", "trials", "unsound"]

DTYPES = ("bool_", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
BAD = ("dtype", "values", "error", "plain result")
"""Outcomes that are wrong; the others are ``equal``, ``refused``, and those without a plain result."""

# Positions, whose values other dtypes would lose.
_INDICES = frozenset({
    "rows", "perm", "ids", "ids32", "ids2", "pairs", "pairs32", "labels", "labels32", "sign5", "seg", "seg32", "n_ml",
})  # fmt: skip
_LEFT_OUT = ("_drawn", "assign_value")  # random numbers; what ends the process on plain tensors
_TOLERANCES = {"Float16": 4e-3, "BFloat16": 4e-2, "Float32": 2e-4, "Complex64": 2e-4}
_ENDED = "ends the process"
_UNSOUND = {
    (".any(", "values"): "MindSpore's kernel takes the bytes of numbers for booleans",
    ("ReduceAny", "values"): "MindSpore's kernel takes the bytes of numbers for booleans",
    ("prelu(", "dtype"): "MindSpore's result has the dtype of an earlier call",
    ("PReLU", "dtype"): "MindSpore's result has the dtype of an earlier call",
    ("clip_by_global_norm", "values"): "MindSpore's squares of int8 overflow",
    ("numpy.fmod", "error"): "complex numbers have no remainder",
}


def unsound(pair: Pair, outcome: str) -> str:
    """Return why MindSpore's own result is nothing to compare with; nothing if it is sound."""
    return next((why for (part, kind), why in _UNSOUND.items() if part in pair.text and kind == outcome), "")


def _sweep() -> Any:
    name = "hyper_parallel_mindspore_sweep"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("sweep.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


SWEEP = _sweep()
importlib.import_module("mindspore.numpy")


_SPELLED = """
ops.CumProd()(x, 0) | ops.CumProd(reverse=True)(x, 1) | ops.CumSum()(x, 0) | ops.CumSum(reverse=True)(x, 1)
ops.ReduceProd()(x, 0) | ops.ReduceSum()(x, 0) | ops.ReduceMean()(x, 0) | ops.ReduceMax()(x, 0) | ops.ReduceAny()(t)
ops.ReduceAny(True)(t, 1) | ops.ReduceAll()(t) | ops.Complex()(x, y) | ops.FastGeLU()(x) | ops.SquareSumAll()(x, y)
ops.LayerNorm()(x, r, r2) | ops.Addcdiv()(x, y, p, o) | ops.Trace()(sq) | ops.CumulativeLogsumexp()(x, 0) | x > 2
x >= 2 | x <= 2.5 | x != 2 | n // 2 | n // 2.5 | n % 2 | n % 2.5 | x ** 2 | x ** 2.5 | 2 ** x | 2.5 ** x | x / 2
2 / p | x - 2 | x - 2.5 | True + x | x * 2.5 | ~t | -x | abs(x) | n << 1 | n >> 1 | x @ a | x & y | x ^ y
x.all(axis=0) | x.any(axis=0) | t.any() | x.argmin(axis=0) | x.argmax(axis=0) | x.remainder(2) | x.remainder(2.5)
x.sub(2.5) | x.where(t, 2) | x.where(t, 2.5) | x.nansum(axis=0) | x.isclose(y, rtol=0.1) | x.sum(axis=0)
x.prod(axis=0) | x.mean(axis=0) | x.mean() | x.max(axis=0) | x.min(axis=0) | x.ptp(axis=0) | x.cumsum() | t.cumsum()
t.cumsum(axis=1) | x.cumprod(0) | mint.lerp(x, y, 0.3) | ops.lerp(x, y, w) | ops.xlogy(x, 2) | ops.xlogy(2, p)
mint.xlogy(p, 2.5) | mint.pow(2, x) | mint.pow(x, 2) | mint.clamp(x, 0, 1) | mint.clamp(x, 0.5, None)
mint.where(t, x, 2) | mint.where(t, 2.5, x) | mint.full_like(x, 2.5) | x.masked_fill(t, 2) | x.masked_fill(t, 2.5)
mint.sum(x, dtype=mindspore.float32) | mint.cumsum(x, 0, dtype=mindspore.int32) | mindspore.numpy.fmod(x, p)
mindspore.numpy.maximum(x, y) | mindspore.numpy.minimum(x, y) | mindspore.numpy.nansum(x) | mindspore.numpy.sign(x)
mindspore.numpy.clip(x, -1, 1) | mindspore.numpy.tril(x) | mindspore.numpy.flip(x) | mindspore.numpy.isnan(x)
mindspore.numpy.ones_like(x) | mindspore.numpy.add(x, y) | mindspore.numpy.mean(x) | mindspore.numpy.sum(x)
mindspore.numpy.var(x) | _written(x, lambda c: [c.__setitem__(0, 1), c][1])
_written(x, lambda c: [c.__setitem__(0, 2.5), c][1]) | _written(x, lambda c: [c.__setitem__(0, y[0]), c][1])
_written(x, lambda c: [c.__setitem__((slice(None), 1), 1), c][1])
_written(x, lambda c: [c.__setitem__(slice(1, 3), y[1:3]), c][1])
_written(x, lambda c: [c.__setitem__(ids, y[ids]), c][1])
"""
"""Spellings that no name has: legacy primitives, signs with numbers, methods with other defaults, writes by index."""


class Pair(NamedTuple):
    """An expression with a dtype for each of its tensors, in the order of its operands."""

    text: str
    dtypes: tuple[str, ...]
    precision: str = ""
    """Dtype of a cell's mixed precision, in which the expression runs."""


class Trial(NamedTuple):
    """What became of a pair: its outcome, the dtypes of both results, and a line about what differs."""

    outcome: str
    plain: tuple[str, ...] = ()
    note: str = ""


def expressions() -> list[str]:
    """Expressions of the operator sweep, and each of two tensors with Python numbers in place of the second."""
    known = [text.strip() for case in SWEEP.cases() if not case.guessed for text in case.expressions]
    known += [item.strip() for line in _SPELLED.split("\n") for item in line.split(" | ") if item.strip()]
    guessed = [text.strip() for case in SWEEP.cases() if case.guessed for text in case.expressions]
    numbers = (other for text in known for other in _with_numbers(text))
    return [text for text in dict.fromkeys([*known, *numbers, *guessed]) if not any(word in text for word in _LEFT_OUT)]


def _with_numbers(text: str) -> Iterator[str]:
    """The expression with True, 2 and 2.5 in place of its second tensor, where both are passed alike."""
    operands = SWEEP.Expression(text).operands
    body = ast.parse(text, mode="eval").body
    if len(operands) != 2 or not isinstance(body, (ast.Call, ast.BinOp)) or _INDICES & set(operands):
        return
    names = [node.id for node in ast.walk(body) if isinstance(node, ast.Name) and node.id in operands]
    own = body.func.value if isinstance(body, ast.Call) and isinstance(body.func, ast.Attribute) else None
    if len(names) == 2 and not (isinstance(own, ast.Name) and own.id == names[1]):
        for number in (True, 2, 2.5):
            parsed = ast.parse(text, mode="eval")
            yield ast.unparse(_Replaced(names[1], number).visit(parsed))


class _Replaced(ast.NodeTransformer):
    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.Constant(self.value) if node.id == self.name else node


def pairs(text: str, dtypes: tuple[str, ...] = DTYPES) -> list[Pair]:
    """Every dtype of the expression's first two tensors; others have that of the first, and indices keep theirs."""
    operands = SWEEP.Expression(text).operands
    free = [name for name in operands if name not in _INDICES][:2]
    found = []
    for chosen in itertools.product(dtypes, repeat=len(free)):
        named = dict(zip(free, chosen, strict=True))
        first = chosen[0] if chosen else ""
        found.append(Pair(text, tuple(named.get(name, "" if name in _INDICES else first) for name in operands)))
    return list(dict.fromkeys(found))


def mixed(text: str, precision: str = "float16") -> list[Pair]:
    """The expression in a cell of mixed precision, on its own operands."""
    arrays = SWEEP.Expression(text).arrays()
    return [Pair(text, ("",) * len(arrays), precision)] if any(item.dtype.kind == "f" for item in arrays) else []


def _as(array: np.ndarray[Any, Any], dtype: str) -> Any:
    """A tensor of ``dtype`` with values like those of ``array``: integers are made of three times the numbers."""
    import mindspore

    target = getattr(mindspore, dtype) if dtype else None
    array = np.asarray(array)
    if not dtype:
        return mindspore.Tensor(array)
    if dtype == "bool_" and array.dtype != bool:
        array = array.real > 0 if array.dtype.kind in "fc" else array % 2 == 1
    if "int" in dtype and array.dtype.kind in "fc":
        array = np.sign(array.real) * np.ceil(np.abs(array.real) * 3)
    if dtype.startswith("u"):
        array = np.abs(array)
    if not dtype.startswith("complex"):
        array = array.real
    if dtype == "bfloat16":
        return mindspore.Tensor(array.astype(np.float32)).astype(target)
    return mindspore.Tensor(array.astype(mindspore.dtype_to_nptype(target)))


def _values(tensor: Any) -> np.ndarray[Any, Any]:
    import mindspore

    return tensor.astype(mindspore.float32).asnumpy() if tensor.dtype == mindspore.bfloat16 else tensor.asnumpy()


def _tensors(pair: Pair, operands: list[Any]) -> list[Any]:
    import mindspore
    from mindspore import nn

    from hyper_parallel.platform.mindspore.versions import pynative_executor

    expression = SWEEP.Expression(pair.text)
    if not pair.precision:
        return SWEEP._tensors(expression.value(operands))

    class Cell(nn.Cell):
        def construct(self, *tensors: Any) -> Any:
            return expression.value(tensors)

    try:
        return SWEEP._tensors(Cell().to_float(getattr(mindspore, pair.precision))(*operands))
    except BaseException:
        pynative_executor.clear_res()  # MindSpore keeps the precision of a cell that raises
        raise


def _dtypes(tensors: list[Any]) -> tuple[str, ...]:
    return tuple(str(tensor.dtype) for tensor in tensors)


def _arrays(pair: Pair, operands: list[Any]) -> tuple[tuple[str, ...], list[Any]]:
    """Dtypes and values of the results."""
    tensors = _tensors(pair, operands)
    if any(isinstance(tensor, DTensor) for tensor in operands) and not all(
        isinstance(each, DTensor) for each in tensors
    ):
        msg = "plain result"
        raise _PlainResultError(msg)
    wholes = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return tuple(str(tensor.dtype) for tensor in tensors), [np.array(_values(whole)) for whole in wholes]


class _PlainResultError(Exception):
    """An operator of DTensors has returned a plain tensor."""


def trial(pair: Pair, mesh: Any) -> Trial:  # noqa: PLR0911 - one per outcome
    """Return the outcome of one pair on ``mesh``, of one rank."""
    arrays = SWEEP.Expression(pair.text).arrays()

    def operands() -> list[Any]:
        return [_as(array, dtype) for array, dtype in zip(arrays, pair.dtypes, strict=True)]

    try:
        dtypes, wanted = _arrays(pair, operands())
        _, again = _arrays(pair, operands())
    except Exception:  # noqa: BLE001 - MindSpore refuses by many types
        return Trial("no plain form")
    if not wanted or not all(map(_same, wanted, again)):
        return Trial("random" if wanted else "no tensor")
    writes = "__setitem__" in pair.text  # of a sharded tensor rows are not written in place
    dtensors = [
        DTensor.from_local(tensor, mesh, [Shard(0) if tensor.ndim and not writes else Replicate()])
        for tensor in operands()
    ]
    kinds = (*dtypes, *(str(tensor.dtype) for tensor in dtensors))
    tolerance = 2e-2 if pair.precision else max(_TOLERANCES.get(kind, 1e-6) for kind in kinds)
    try:
        served, got = _arrays(pair, dtensors)
    except _PlainResultError:
        return Trial("plain result", dtypes)
    except HyperParallelError as error:
        return Trial("refused", dtypes, SWEEP._first_line(error))
    except Exception as error:  # noqa: BLE001 - reported
        return Trial("error", dtypes, SWEEP._first_line(error))
    if served != dtypes:
        return Trial("dtype", dtypes, f"became {', '.join(served)}")
    for mine, own in zip(got, wanted, strict=True):
        if not _same(mine, own, tolerance):
            return Trial("values", dtypes, f"{own.reshape(-1)[:6].tolist()} became {mine.reshape(-1)[:6].tolist()}")
    return Trial("equal", dtypes)


def _same(mine: Any, own: Any, tolerance: float = 0) -> bool:
    if mine.shape != own.shape or own.dtype.kind not in "fc":
        return np.array_equal(mine, own)
    return np.allclose(mine, own, rtol=tolerance, atol=tolerance, equal_nan=True)


def trials(wanted: Iterable[Pair]) -> list[Trial]:
    """Return the outcomes of pairs, in this process."""
    platform_named("mindspore")
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("m",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [trial(pair, mesh) for pair in wanted]


def isolated(wanted: list[Pair]) -> list[Trial]:
    """Return the outcomes of pairs, in a process of their own, since some kernels end it."""
    try:
        return simulate(trials, 1, platform="mindspore", args=(wanted,), timeout=600)[0]
    except RankFailedError as error:
        if len(wanted) == 1:
            return [Trial(_ENDED, (), str(error)[:200])]
        half = len(wanted) // 2
        return isolated(wanted[:half]) + isolated(wanted[half:])
