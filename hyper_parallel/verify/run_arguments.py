"""Arguments of a verification, given as text or numbers: the mesh, the seed, and the kind of ranks."""

from __future__ import annotations

import math

from hyper_parallel.core.dtensor.random import SEEDS
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.simulate import MOST_RANKS

__all__ = ["LAUNCHES", "parse_mesh", "require_seed"]

LAUNCHES = ("simulated", "processes")
_MOST_DIGITS = 9
_AXIS_NAMES = {1: ("tp",), 2: ("dp", "tp")}


def parse_mesh(
    mesh: str | None, world_size: int | None, most: int = MOST_RANKS
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return sizes and names of the axes: ``3`` is ``tp``, ``2x2`` is ``dp`` by ``tp``, ``dp=2,tp=3`` names them.

    Args:
        mesh: the mesh as text; None is one axis of ``world_size``.
        world_size: number of ranks, if given.
        most: largest number of ranks of the mesh.

    Raises:
        InputError: (a ValueError) the text is not a mesh, has too many ranks, or contradicts the world size.
    """
    if mesh is None and world_size is None:
        msg = "the number of ranks is missing; give --mesh, such as --mesh 2x2, or --world-size"
        raise InputError(msg)
    text = str(world_size) if mesh is None else mesh
    named = "=" in text
    parts = [part.partition("=") for part in text.split("," if named else "x")]
    sizes = [(size if named else name) for name, _, size in parts]
    names = tuple(name for name, _, _ in parts)
    if not all(map(_is_size, sizes)) or (named and not all(name.isidentifier() for name in names)):
        msg = f"--mesh {text!r} must look like 3, 2x2 or dp=2,tp=3"
        if mesh is None:
            msg = f"--world-size {text} must be at least 1"
        raise InputError(msg)
    if too_long := [size for size in sizes if len(size) > _MOST_DIGITS]:  # Python converts no text of 4301 digits
        option = f"--world-size {text}" if mesh is None else f"--mesh {text!r}"
        msg = f"{option} has a size of {len(too_long[0])} digits; there can be at most {most} ranks"
        raise InputError(msg)
    shape = tuple(int(size) for size in sizes)
    if not named and len(shape) not in _AXIS_NAMES:
        msg = f"--mesh {text!r} has {len(shape)} axes; name them, such as pp=2,dp=2,tp=2"
        raise InputError(msg)
    names = names if named else _AXIS_NAMES[len(shape)]
    if repeated := [name for name in names if names.count(name) > 1]:
        msg = f"--mesh {text!r} has two axes named {repeated[0]!r}; give the axes different names"
        raise InputError(msg)
    if math.prod(shape) > most:
        option = "--world-size" if mesh is None else "--mesh"
        msg = f"{option} {text} has {math.prod(shape)} ranks; there can be at most {most}"
        raise InputError(msg)
    if world_size is not None and math.prod(shape) != world_size:
        msg = f"--mesh {text} has {math.prod(shape)} ranks, but --world-size is {world_size}; leave out one of them"
        raise InputError(msg)
    return shape, names


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdecimal() and bool(text.strip("0"))


def require_seed(seed: int) -> None:
    """Check that every framework supports ``seed``.

    Raises:
        InputError: (a ValueError) ``seed`` is not an integer from 0 to 2**32 - 1.
    """
    if type(seed) is not int or not 0 <= seed < SEEDS:
        msg = f"--seed is {seed!r}; it must be a whole number from 0 to {SEEDS - 1}"
        raise InputError(msg)
