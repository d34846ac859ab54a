"""Writes a failed check as a program of at most 15 lines that reproduces the failure."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.placements import Partial, StridedShard
from hyper_parallel.verify.attempt import Raised, attempt
from hyper_parallel.verify.ops.user_operators import UserOperator
from hyper_parallel.verify.ops.values import Slot

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.placements import Placement
    from hyper_parallel.core.shard.sample import Sample
    from hyper_parallel.verify.ops.values import FilledSample

__all__ = ["program"]

_IMPORTS = "from hyper_parallel import Partial, Replicate, Shard"

Places = Sequence[Sequence["Placement"]]


def program(
    platform: str,
    op: str | UserOperator,
    number: int,
    sample: Sample,
    filled: FilledSample,
    mesh: tuple[int, ...],
    places: Places,
    device: str = "cpu",
) -> str:
    """Return a program that calls :func:`check_function`, or, if that program does not fail, :func:`check_one`."""
    plain = None if isinstance(op, UserOperator) else _plain(platform, op, sample, filled, mesh, places, device)
    if plain is not None and _shows(plain):
        return plain
    return _by_number(platform, op, number, filled, mesh, places, device)


def _plain(
    platform: str, op: str, sample: Sample, filled: FilledSample, mesh: tuple[int, ...], places: Places, device: str
) -> str | None:
    differentiates = all(
        want or array.dtype.kind not in "fc" for want, array in zip(filled.requires_grad, filled.arrays, strict=True)
    )
    if sample.writes or sample.random or sample.uninitialized or not differentiates:
        return None
    head = ["from hyper_parallel.platform.select import platform_named"]
    call = f"platform_named({platform!r}).dispatcher.ops.{op}"
    names = [f"x{index}" for index in range(len(filled.arrays))]
    arguments = [_source(value, names) for value in filled.args]
    arguments += [f"{name}={_source(value, names)}" for name, value in filled.kwargs.items()]
    if any("<" in argument for argument in arguments):
        return None
    if any(f"{platform}." in argument for argument in arguments):
        head.append(f"import {platform}")
    options = f"platform={platform!r}, placements=places{_on(device)}"
    lines = [
        "import numpy as np",
        _IMPORTS + _strided(places),
        *head,
        "from hyper_parallel.verify import check_function",
        *(f"{name} = {_array(array)}" for name, array in zip(names, filled.arrays, strict=True)),
        f"def run({', '.join(names)}):",
        f"    return {call}({', '.join(arguments)})",
        f"places = [{', '.join(f'[{_places(placements)}]' for placements in places)}]",
        f"report = check_function(run, [{', '.join(names)}], {mesh}, {options})",
        "assert report.ok, report.wrong",
    ]
    return "\n".join(lines) if len(lines) <= 15 else None


def _by_number(
    platform: str,
    op: str | UserOperator,
    number: int,
    filled: FilledSample,
    mesh: tuple[int, ...],
    places: Places,
    device: str,
) -> str:
    op_source = f"{op.name!r}, file={op.file!r}" if isinstance(op, UserOperator) else repr(op)
    dtype = next((str(array.dtype) for array in filled.arrays if array.dtype.kind in "fc"), "float64")
    return "\n".join(
        [
            _IMPORTS + _strided(places),
            "from hyper_parallel.verify.ops.sweep import check_one",
            f"places = [{', '.join(_places(placements) for placements in places)}]",
            f"report = check_one({platform!r}, {op_source}, sample={number}, sizes={filled.sizes}, dtype={dtype!r},",
            f"                   integral={filled.integral}, mesh={mesh}, places=places{_on(device)})",
            "assert report.holds, report.text()",
        ]
    )


def _strided(places: Places) -> str:
    used = any(isinstance(placement, StridedShard) for placements in places for placement in placements)
    return ", StridedShard" if used else ""


def _on(device: str) -> str:
    return "" if device == "cpu" else f", device={device!r}"


def _places(placements: Sequence[Placement]) -> str:
    texts = (
        f"Partial({placement.reduce_op!r})" if isinstance(placement, Partial) else repr(placement)
        for placement in placements
    )
    return f"({', '.join(texts)},)"


def _array(array: Any) -> str:
    with np.printoptions(precision=17, floatmode="maxprec", threshold=10**6, linewidth=10**6):
        text = " ".join(np.array2string(array, separator=",").split())
    text = text.replace("nan", "np.nan").replace("inf", "np.inf")
    return f"np.array({text}, np.{array.dtype.name if array.dtype.name != 'bool' else 'bool_'})" + (
        f".reshape({array.shape})" if 0 in array.shape else ""
    )


def _source(value: Any, names: Sequence[str]) -> str:
    if isinstance(value, Slot):
        return names[value.index]
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_source(item, names) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f"float('{value}')"
    return repr(value) if not isinstance(value, type(...)) else "..."


def _shows(text: str) -> bool:
    """Run a program and return whether it fails."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return isinstance(attempt(_execute, text), Raised)


def _execute(text: str) -> None:
    exec(compile(text, "<reproducer>", "exec"), {"__name__": "reproducer"})  # noqa: S102 - our own program
