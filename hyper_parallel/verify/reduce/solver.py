"""Chooses the smallest sizes with the same relations to each other, and to the mesh, as those of the large model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.reduce.keys import HEAD, WIDTHS

__all__ = ["Axes", "Sizes", "require_division", "smallest_sizes"]

Sizes = Mapping[str, int]
Axes = Mapping[str, tuple[int, int]]
"""By name of the axis: the axis's size in the large run, and in the small run."""

_GROUPED = (("heads", "kv_heads"), ("linear_value_heads", "linear_key_heads"))
"""Pairs of sizes whose ratio matters: a number of heads, and the number of key-value (or key) heads that they share."""
_DIVIDED = {
    "heads": "tp", "kv_heads": "tp", "linear_value_heads": "tp", "linear_key_heads": "tp", "hidden": "tp",
    "intermediate": "tp", "moe_intermediate": "tp", "shared_intermediate": "tp", "vocab": "tp", "experts": "ep",
}  # fmt: skip
"""By size: the axis whose ranks divide it."""
_MUST_DIVIDE = ("heads", "experts")
_LEAST = {"hidden": 32, "head_dim": 8, "vocab": 64}
_LEAST_HEAD, _LEAST_WIDTH = 4, 12
_MOST_CHOSEN = 4
"""Largest number of experts per token of the small model."""
_CANDIDATES = 160
_ATTEMPTS = 200_000


def require_division(file: str, sizes: Sizes, axes: Axes, keys: Mapping[str, str]) -> None:
    """Check that the large configuration can run.

    Raises:
        InputError: (a ValueError) heads or experts are not divisible as the mesh or their groups require.
    """
    for role in _MUST_DIVIDE:
        axis = _DIVIDED[role]
        if role in sizes and sizes[role] % axes[axis][0]:
            msg = (
                f"{file}: {keys[role]} is {sizes[role]}, which {axis}={axes[axis][0]} does not divide; correct the "
                f"number, or the size of axis {axis}"
            )
            raise InputError(msg)
    for many, few in (*_GROUPED, ("experts", "groups")):
        if many in sizes and sizes[many] % sizes.get(few, 1):
            msg = (
                f"{file}: {keys[many]} is {sizes[many]}, not a multiple of {keys[few]}, which is {sizes[few]}; correct "
                "one of them"
            )
            raise InputError(msg)


def smallest_sizes(file: str, sizes: Sizes, axes: Axes, fits_head: Callable[[int], bool]) -> dict[str, int]:
    """Return a size for each role of the large model.

    Args:
        file: file name of the large model, for messages.
        sizes: sizes of the large model, by role.
        axes: axes of the mesh.
        fits_head: function that returns whether rotary embeddings support a width of a head.

    Raises:
        InputError: (a ValueError) no smaller sizes have the same relations as the sizes of the model.
    """
    chosen: dict[str, int] = {}
    order = [role for role in _sequence(sizes) if role in sizes]
    attempts = itertools.count()

    def choose(position: int) -> bool:
        if position == len(order):
            return True
        role = order[position]
        for size in itertools.islice(_candidates(role, sizes, axes, chosen), _CANDIDATES):
            if size > sizes[role]:
                break
            if role in {"head_dim", "rope"} and not fits_head(size):
                continue
            chosen[role] = size
            if next(attempts) > _ATTEMPTS:
                break
            if _fits(role, sizes, chosen, axes) and choose(position + 1):
                return True
        chosen.pop(role, None)
        return False

    if not choose(0):
        msg = f"{file}: no smaller sizes relate to each other as these do; verify the program with the file as it is"
        raise InputError(msg)
    return chosen


def _sequence(sizes: Sizes) -> list[str]:
    """Return the roles in the order in which they are chosen: counts, heads, hidden size, other widths ascending."""
    counts = ["groups", "top_groups", "top_k", "kv_heads", "heads", "linear_key_heads", "linear_value_heads"]
    heads = sorted(HEAD, key=lambda role: sizes.get(role, 0))
    widths = sorted((role for role in WIDTHS if role != "hidden"), key=lambda role: sizes.get(role, 0))
    return [*counts, *heads, "hidden", *widths, "experts"]


def _candidates(role: str, sizes: Sizes, axes: Axes, chosen: Sizes) -> Iterable[int]:
    """Return candidate sizes of a role, in ascending order."""
    size = sizes[role]
    shared = dict(_GROUPED).get(role, "")
    if role in HEAD:
        return itertools.count(max(_LEAST.get(role, _LEAST_HEAD) - size % 2, 1), 2)
    if role == "experts":
        return _experts(sizes, axes, chosen)
    if shared in sizes:
        return [chosen[shared] * (size // sizes[shared])]
    if role == "hidden" and size == sizes["heads"] * sizes.get("head_dim", 0):
        return [chosen["heads"] * chosen["head_dim"]]
    groups = sizes.get("top_groups", 1)
    few = {"top_k": _MOST_CHOSEN, "top_groups": 2, "groups": sizes.get("groups", 1) // groups * min(groups, 2)}
    return [min(size, few[role])] if role in few else _divided(role, sizes, axes, chosen)


def _divided(role: str, sizes: Sizes, axes: Axes, chosen: Sizes) -> Iterator[int]:
    """Yield sizes that give each rank more than one; an axis divides a size if it divides the large size."""
    size = sizes[role]
    big, small = axes.get(_DIVIDED.get(role, ""), (1, 1))
    if size <= big:
        yield from [small] if size == big else range(max(size * small // big, min(size, 2, small - 1)), small)
        return
    least = _LEAST.get(role, _LEAST_WIDTH if role in WIDTHS else 2)
    smaller = [chosen[other] for other in WIDTHS if role in WIDTHS and other in chosen and sizes[other] < size]
    step = 1 if size % big else 4
    for number in itertools.count(max(least, 2 * small, *smaller)):
        if (number % small == 0) == (size % big == 0) and (role not in WIDTHS or size % step or number % step == 0):
            yield number


def _experts(sizes: Sizes, axes: Axes, chosen: Sizes) -> Iterator[int]:
    """Yield numbers of experts: more than a token chooses, at least two per rank, the same number in each group.

    If the mesh has no axis for experts, the ranks of any axis may divide the experts. So all axes that divide the large
    number also divide the small one.
    """
    top, groups = chosen.get("top_k", 1), chosen.get("groups", 1)
    small = math.lcm(*(axes[axis][1] for axis in axes if axis != "pp" and sizes["experts"] % axes[axis][0] == 0))
    sparse = sizes["experts"] >= 2 * sizes.get("top_k", 1)
    for number in itertools.count(max(2 * axes["ep"][1], small)):
        each_group = number // groups
        least = 1 if groups == 1 else max(2, math.ceil(top / chosen.get("top_groups", groups)))
        if number % small == 0 == number % groups and number >= top * (1 + sparse) and each_group >= least:
            yield number


def _products(sizes: Sizes) -> dict[str, int]:
    """Return the dims of a model's tensors that are composed of several sizes, such as fused weights."""
    found = {}
    for name, parts in _PRODUCTS.items():
        if all(role in sizes for factors in parts for role in factors.split("*") if not role.isdecimal()):
            found[name] = sum(_product(factors, sizes) for factors in parts)
    return found


_PRODUCTS = {
    "all query heads": ("heads*head_dim",),
    "all key heads": ("kv_heads*head_dim",),
    "fused query, key and value": ("heads*head_dim", "2*kv_heads*head_dim"),
    "fused gate and up": ("2*intermediate",),
    "fused gate and up of an expert": ("2*moe_intermediate",),
    "all MLA queries": ("heads*nope", "heads*rope"),
    "all MLA keys and values": ("heads*nope", "heads*v_head"),
    "all MLA values": ("heads*v_head",),
    "compressed MLA keys and values": ("kv_lora", "rope"),
    "all linear keys": ("linear_key_heads*linear_key_dim",),
    "all linear values": ("linear_value_heads*linear_value_dim",),
}
"""Names of dims, and the products that add up to each."""


def _product(factors: str, sizes: Sizes) -> int:
    result = 1
    for role in factors.split("*"):
        result *= int(role) if role.isdecimal() else sizes[role]
    return result


def _fits(role: str, sizes: Sizes, chosen: Sizes, axes: Axes) -> bool:
    """Return whether the last chosen size has the same relations to the others as in the large model."""
    big, small = axes.get(_DIVIDED.get(role, ""), (1, 1))
    if (sizes[role] % big == 0) != (chosen[role] % small == 0):
        return False
    both = {"hidden", "heads"} <= set(chosen)
    if both and sizes["hidden"] % sizes["heads"] == 0 < chosen["hidden"] % chosen["heads"]:
        return False
    group = next((group for group in (HEAD, WIDTHS) if role in group), ())
    if any(_order(sizes, role, other) != _order(chosen, role, other) for other in group if other in chosen):
        return False
    large, little = _dims(sizes, chosen), _dims(chosen, chosen)
    pairs = itertools.combinations(large, 2)
    if any(large[one] != large[other] and little[one] == little[other] for one, other in pairs):
        return False
    tied = large.get("all query heads") == large.get("hidden", 0)
    return "hidden" not in chosen or tied == (little.get("all query heads") == little["hidden"])


def _dims(sizes: Sizes, known: Sizes) -> dict[str, int]:
    """Return the sizes of tensor dims, for the roles in ``known``; a single key head is as wide as all key heads."""
    plain = {role: sizes[role] for role in known if role not in {"top_k", "top_groups", "groups"}}
    dims = {**plain, **_products(plain)}
    if known.get("kv_heads") == 1:
        dims.pop("all key heads", None)
    return dims


def _order(sizes: Sizes, one: str, other: str) -> int:
    """Return 1, 0 or -1 if one size is larger than, equal to or smaller than another."""
    return (sizes[one] > sizes[other]) - (sizes[one] < sizes[other])
