"""Makes a small configuration from a large one: the changed values and their roles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.verify.reduce.document import Document
from hyper_parallel.verify.reduce.keys import BATCHES, MICRO_BATCHES, looks_like_a_size
from hyper_parallel.verify.reduce.layers import Pattern, fewest_layers, frequency_text
from hyper_parallel.verify.reduce.solver import require_division, smallest_sizes
from hyper_parallel.verify.reduce.structure import Structure, read_structure

__all__ = ["Reduction", "reduce_document"]

_TOKENS = 16
"""Smallest limit of positions."""


@dataclass(frozen=True)
class Reduction:
    """A small configuration.

    Attributes:
        structure: structure of the large configuration.
        sizes: sizes of the small configuration, by role.
        pattern: pattern of the small model's layers.
        changed: new values, by key.
        left: keys of numbers that look like sizes but are not changed.
    """

    structure: Structure
    sizes: Mapping[str, int]
    pattern: Pattern
    changed: Mapping[str, Any]
    left: tuple[str, ...]

    @property
    def text(self) -> str:
        """The small configuration, in the format of the large one."""
        return self.structure.document.with_values(self.changed)


def reduce_document(document: Document, mesh: Mapping[str, int]) -> Reduction:
    """Return the smallest configuration with the structure of a document.

    Args:
        document: the large configuration.
        mesh: axes of the large run that are not in the document.

    Raises:
        InputError: (a ValueError) the document contradicts itself, or no smaller sizes have the same relations.
    """
    structure = read_structure(document, mesh)
    sizes, axes = structure.sizes, structure.axes
    require_division(document.name, sizes, axes, structure.first_keys())
    values = document.values
    share = float(next((v for k, v in values.items() if k.endswith("partial_rotary_factor") and v), 1.0))
    small = smallest_sizes(document.name, sizes, axes, lambda width: _is_even(width * share))
    virtual = min(structure.virtual, 2)
    pattern = structure.pattern
    if pattern.layers:
        pattern = fewest_layers(pattern, (axes["pp"][0] * structure.virtual, axes["pp"][1] * virtual))
    small |= _following(structure, small, pattern, virtual)
    proposed: dict[str, Any] = {
        key: small[role] for role, keys in structure.keys.items() if role in small for key in keys if sizes.get(role)
    }
    proposed |= {key: axes[axis][1] for key, axis in structure.axis_keys.items()}
    proposed |= {key: "debugmodel" for key in values if key.endswith("model.flavor")}
    proposed |= _positions(structure, small)
    proposed |= {
        key: frequency_text(kinds) if isinstance(values[key], str) else kinds for key, kinds in pattern.lists.items()
    }
    proposed |= _batches(structure)
    head = "rope" if "rope" in sizes else "head_dim"
    if head in sizes:
        proposed |= _rotary_lists(structure, share * sizes[head] / 2, share * small[head] / 2)
    if "vocab" in small:
        proposed |= _token_ids(values, small["vocab"])
    changed = {key: value for key, value in proposed.items() if value != values[key]}
    named = {*proposed, *(key for keys in structure.keys.values() for key in keys)}
    left = tuple(
        key
        for key, value in values.items()
        if key not in named and type(value) is int and value > 1 and looks_like_a_size(key)
    )
    return Reduction(structure, small, pattern, changed, left)


def _is_even(width: float) -> bool:
    return width >= 2 and width == int(width) and int(width) % 2 == 0


def _following(structure: Structure, small: Mapping[str, int], pattern: Pattern, virtual: int) -> dict[str, int]:
    """Return the sizes that follow from other sizes."""
    sizes, tp, stages = structure.sizes, structure.axes["tp"][1], structure.axes["pp"][1]
    found = {"layers": pattern.layers, "dense_layers": pattern.dense, "virtual": virtual}
    if "virtual_layers" in sizes:
        found["virtual_layers"] = pattern.layers // (stages * virtual)
    if "expert_tp" in sizes:
        found["expert_tp"] = min(sizes["expert_tp"], tp)
    if "qk_head" in sizes:
        found["qk_head"] = small["nope"] + small["rope"]
    if "scalar" in sizes:
        found["scalar"] = _scalar(sizes, small)
    if "layer_index" in sizes:
        found["layer_index"] = math.ceil(sizes["layer_index"] * pattern.layers / sizes["layers"])
    return found


def _scalar(sizes: Mapping[str, int], small: Mapping[str, int]) -> int:
    """Return the number whose square root divides attention scores: a width of a head, or the unchanged number."""
    if sizes["scalar"] == sizes["head_dim"]:
        return small["head_dim"]
    return (
        small["hidden"] // small["heads"] if sizes["scalar"] == sizes["hidden"] // sizes["heads"] else sizes["scalar"]
    )


def _batches(structure: Structure) -> dict[str, int]:
    """Return samples and forwards per step: two samples, and enough forwards to fill each stage twice."""
    values, axes = structure.document.values, structure.axes
    forwards = max(2 * axes["pp"][1], 2)
    found, samples = {}, (1, 1)
    for key, value in values.items():
        last = key.rpartition(".")[2]
        if isinstance(value, int) and value > 0 and last in (*BATCHES, *MICRO_BATCHES):
            most = forwards if last in MICRO_BATCHES or last == "local_batch_size" else 2
            found[key] = min(value, most)
            samples = (value, found[key]) if last in BATCHES else samples
    ranks = [math.prod(sizes[side] for axis, sizes in axes.items() if axis.startswith("dp")) for side in (0, 1)]
    for key, value in values.items():
        if key.rpartition(".")[2] in {"global-batch-size", "global_batch_size"} and value > 0:
            each = max(value // (samples[0] * ranks[0]), 1)
            found[key] = samples[1] * ranks[1] * min(each, forwards)
    return found


def _positions(structure: Structure, small: Mapping[str, int]) -> dict[str, int]:
    """Return limits of positions with unchanged ratios, all different from the other sizes."""
    if not structure.positions:
        return {}
    least = min(structure.positions.values())
    ranks = 2 * structure.axes["cp"][1] * structure.axes["tp"][1]
    taken = set(small.values())
    base = next(
        base
        for base in range(math.ceil(_TOKENS / ranks) * ranks, 1 << 20, ranks)
        if not taken & {value * base // least for value in structure.positions.values()}
    )
    return {key: min(value * base // least, value) for key, value in structure.positions.items()}


def _rotary_lists(structure: Structure, large: float, small: float) -> dict[str, list[Any]]:
    """Return the lists of rotary embeddings, which have one number per pair of features, shortened for the small head.

    Sections of such a list keep their shares of it.
    """
    found: dict[str, list[Any]] = {}
    for key, value in structure.document.values.items():
        if not key.startswith(structure.model) or not isinstance(value, list) or not value or large <= small:
            continue
        if len(value) == large:
            found[key] = [value[int(index * large / small)] for index in range(int(small))]
        elif key.endswith("mrope_section") and sum(value) == large:
            sections = [max(int(part * small / large), 1) for part in value]
            found[key] = [*sections[:-1], int(small) - sum(sections[:-1])]
    return found


def _token_ids(values: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """Return new ids of special tokens whose ids are not in the small vocabulary, each token with a different one."""
    ids = {key: value for key, value in values.items() if key.endswith(("_token_id", "_token_ids"))}
    flat = [each for value in ids.values() for each in (value if isinstance(value, list) else [value])]
    large = sorted({each for each in flat if isinstance(each, int) and each >= vocab})
    free = (each for each in range(vocab - 1, -1, -1) if each not in flat)
    new = dict(zip(large, free, strict=False))
    return {
        key: [new.get(each, each) for each in value] if isinstance(value, list) else new.get(value, value)
        for key, value in ids.items()
    }
