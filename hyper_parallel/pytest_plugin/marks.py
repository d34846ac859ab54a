"""Marks of the plugin, and those of ``arg_mark`` from Ascend's test suites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from hyper_parallel.transport.timeouts import positive_seconds

__all__ = ["MARKS", "arg_mark", "mesh_shape", "seconds", "spelled", "world_sizes"]

T = TypeVar("T", bound=Callable[..., Any])

MARKS = (
    "platforms(*names, together=False): frameworks the test needs one of, or with together=True all of",
    "world_size(*sizes): the test runs on every rank of a world; once for each size",
    "mesh(*sizes, names=None): the same, with the fixture `mesh` of this shape",
    "launch(*names): how ranks are started: simulated, processes; once for each name",
    "rank_timeout(seconds): after this time every rank's stack is shown and the ranks are ended",
    "device(name, devices=1): the test needs that many devices: npu, cuda",
)

_PLATFORMS = ("platform_ascend", "platform_ascend910b", "platform_gpu", "cpu_linux", "cpu_windows", "cpu_macos")
_LEVELS = ("level0", "level1", "level2", "level3", "level4")
_CARDS = ("onecard", "allcards", "dryrun", "dryrun_only")
_ESSENTIALS = ("essential", "unessential")

ARG_MARKS = {
    **dict.fromkeys(_PLATFORMS, "where the test runs (arg_mark)"),
    **dict.fromkeys(_LEVELS, "how often it runs, level0 most often (arg_mark)"),
    **dict.fromkeys(_CARDS, "how many devices it takes (arg_mark)"),
    **dict.fromkeys(_ESSENTIALS, "whether it belongs to the smallest set (arg_mark)"),
}


def arg_mark(
    *, plat_marks: Sequence[str], level_mark: str, card_mark: str, essential_mark: str = "unessential"
) -> Callable[[T], T]:
    """Mark a test as in Ascend's test suites, for ``pytest -m "level0 and platform_ascend910b"``.

    Args:
        plat_marks: any of ``platform_ascend``, ``platform_ascend910b``, ``platform_gpu``, ``cpu_linux``,
            ``cpu_windows``, ``cpu_macos``.
        level_mark: ``level0`` to ``level4``.
        card_mark: ``onecard``, ``allcards``, ``dryrun`` or ``dryrun_only``.
        essential_mark: ``essential`` or ``unessential``.

    Raises:
        ValueError: a name is not one of these; a mistyped mark would always deselect its test.
    """
    if isinstance(plat_marks, str) or not plat_marks:
        msg = f"arg_mark(plat_marks={plat_marks!r}): expected a list with at least one of {', '.join(_PLATFORMS)}"
        raise ValueError(msg)
    for name in plat_marks:
        _check("plat_marks", name, _PLATFORMS)
    _check("level_mark", level_mark, _LEVELS)
    _check("card_mark", card_mark, _CARDS)
    _check("essential_mark", essential_mark, _ESSENTIALS)

    def decorate(test: T) -> T:
        for name in (*plat_marks, level_mark, card_mark, essential_mark):
            test = getattr(pytest.mark, name)(test)
        return test

    return decorate


def _check(argument: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        msg = f"arg_mark({argument}={name!r}): known are {', '.join(known)}"
        raise ValueError(msg)


def spelled(mark: pytest.Mark) -> str:
    """Return the mark as source: ``mesh(2, 2, names=('dp', 'tp'))``."""
    arguments = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
    return f"{mark.name}({', '.join(arguments)})"


def seconds(value: object, source: str) -> float:
    """Return a time limit in seconds.

    Raises:
        pytest.UsageError: the value is not a positive, finite number.
    """
    try:
        return positive_seconds(value, f"{source} {value!r}")
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def mesh_shape(mark: pytest.Mark | None) -> tuple[int, ...] | None:
    """Return the sizes of a ``mesh`` mark, given one by one or as a tuple."""
    if mark is None:
        return None
    sizes = mark.args[0] if len(mark.args) == 1 and isinstance(mark.args[0], (tuple, list)) else mark.args
    if not sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        msg = f"mark {spelled(mark)}: sizes of the axes are positive integers, for example mesh(2, 2)"
        raise pytest.UsageError(msg)
    return tuple(sizes)


def world_sizes(item_marks: Callable[[str], pytest.Mark | None]) -> list[int]:
    """Return the world sizes of a test from its marks ``world_size`` and ``mesh``; empty for an ordinary test.

    Args:
        item_marks: ``get_closest_marker`` of the item.
    """
    mark, shape = item_marks("world_size"), mesh_shape(item_marks("mesh"))
    size = None if shape is None else math.prod(shape)
    if mark is None:
        return [] if size is None else [size]
    sizes = list(mark.args[0]) if len(mark.args) == 1 and isinstance(mark.args[0], (tuple, list)) else list(mark.args)
    if not sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        msg = f"mark {spelled(mark)}: sizes are positive integers, for example world_size(2, 3)"
        raise pytest.UsageError(msg)
    if size is not None and sizes != [size]:
        msg = f"mark {spelled(mark)} and mesh{shape} disagree: that mesh has {size} ranks; leave world_size out"
        raise pytest.UsageError(msg)
    return sizes
