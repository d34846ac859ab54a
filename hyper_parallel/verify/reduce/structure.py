"""The model and mesh of a configuration: sizes by role, the pattern of layers, axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.reduce.document import Document
from hyper_parallel.verify.reduce.keys import (
    AXES,
    AXIS_KEYS,
    FORMATS,
    NEEDED,
    PERIODS,
    POSITIONS,
    ROLES,
    SPLIT_BY_HAND,
)
from hyper_parallel.verify.reduce.layers import Pattern, frequencies

__all__ = ["Structure", "read_structure"]

_ASSUMED = {"huggingface": ("tp", "ep"), "torchtitan": ("dp_shard",), "megatron": ("dp",), "mindformers": ()}
"""By format: axes that files do not name, and that are assumed to be 2."""
_MODEL = ("", "text_config.")
"""Keys under which a config may have its language model."""


@dataclass(frozen=True)
class Structure:
    """A model and its mesh.

    Attributes:
        document: configuration of the model and mesh.
        model: prefix of the model's keys.
        sizes: sizes by role, always including the width of a head, which some files omit.
        keys: the keys of each role.
        pattern: pattern of the layers.
        positions: numbers of tokens, by key.
        axes: axes of the mesh, by name: size in the large run and in the small one.
        axis_keys: the keys of the axes that the document names.
        assumed: axes that neither the document nor the user names.
        virtual: number of stages per rank of axis pp.
    """

    document: Document
    model: str
    sizes: Mapping[str, int]
    keys: Mapping[str, list[str]]
    pattern: Pattern
    positions: Mapping[str, int]
    axes: Mapping[str, tuple[int, int]]
    axis_keys: Mapping[str, str]
    assumed: tuple[str, ...]
    virtual: int

    def first_keys(self) -> dict[str, str]:
        """Return a key of each role, for messages."""
        return {role: keys[0] for role, keys in self.keys.items()}


def read_structure(document: Document, mesh: Mapping[str, int]) -> Structure:
    """Return the structure that a document describes.

    Args:
        document: the configuration.
        mesh: axes of the large run that the user names, by name.

    Raises:
        InputError: (a ValueError) a size is missing, is not a number, or two keys of one role contradict each other.
    """
    model = next((each for each in _MODEL if _has(document, each, "layers")), "")
    keys: dict[str, list[str]] = {}
    for key, role in _roles(document, model):
        keys.setdefault(role, []).append(key)
    sizes = {role: _one_size(document, named) for role, named in keys.items()}
    sizes = {role: size for role, size in sizes.items() if size}
    for role in NEEDED[document.format]:
        if role not in sizes:
            if role in keys:
                msg = f"{document.name}: {keys[role][0]} is 0; it must be an integer of at least 1"
                raise InputError(msg)
            names = [key for key, other in ROLES[document.format].items() if other == role]
            msg = f"{document.name} cannot be reduced as {FORMATS[document.format]}: it has no {names[0]}" + (
                f" ({', '.join(names[1:])})" if names[1:] else ""
            )
            raise InputError(msg)
    if "heads" in sizes and "kv_lora" not in sizes:
        sizes.setdefault("kv_heads", sizes["heads"])
        if "head_dim" not in sizes:
            sizes["head_dim"] = _head_dim(document.name, sizes, keys)
    own = {key: value for key, value in document.values.items() if key.startswith(model)}
    for key, value in own.items():
        if key.rpartition(".")[2] in SPLIT_BY_HAND and _splits(value):
            msg = f"{document.name}: {key} splits the layers by hand; reduce a copy without it, and split that by hand"
            raise InputError(msg)
    axis_keys, named = _axes(document, mesh)
    assumed = tuple(
        axis
        for axis in _ASSUMED[document.format]
        if axis not in named and (axis != "ep" or "experts" in sizes) and not (mesh and _names_no_axes(document))
    )
    large = {axis: named.get(axis, 2 if axis in assumed else 1) for axis in AXES}
    axes = _small_axes(large, document.format, sizes.get("kv_heads", 1))
    numbers = {key: value for key, value in own.items() if _is_size(value)}
    return Structure(
        document, model, sizes, keys,
        pattern=_pattern(sizes, own, numbers),
        positions={key: value for key, value in numbers.items() if key.rpartition(".")[2] in POSITIONS},
        axes=axes, axis_keys=axis_keys, assumed=assumed, virtual=_virtual(document.name, sizes, axes["pp"][0], keys),
    )  # fmt: skip


def _names_no_axes(document: Document) -> bool:
    """Return whether documents of this format name no axes."""
    return document.format == "huggingface"


def _pattern(sizes: Mapping[str, int], own: Mapping[str, Any], numbers: Mapping[str, int]) -> Pattern:
    """Return the pattern of the layers; without any if their number is not in the document."""
    layers = sizes.get("layers", 0)
    kinds = {key: frequencies(value) or value for key, value in own.items()}
    lists = {
        key: kind
        for key, kind in kinds.items()
        if isinstance(kind, list) and len(kind) == layers > 1 and all(isinstance(each, (str, int)) for each in kind)
    }
    periods = {key: value for key, value in numbers.items() if key.rpartition(".")[2] in PERIODS}
    return Pattern(layers, sizes.get("dense_layers", 0), periods, lists)


def _splits(value: Any) -> bool:
    """Return whether the value of a key of ``SPLIT_BY_HAND`` splits layers, that is, is not empty or 0."""
    return any(value) if isinstance(value, list) else value not in (None, 0, "")


def _virtual(file: str, sizes: Mapping[str, int], stages: int, keys: Mapping[str, list[str]]) -> int:
    """Return the number of stages per rank of the pipeline axis."""
    if "virtual_layers" not in sizes:
        return sizes.get("virtual", 1)
    virtual, rest = divmod(sizes["layers"], stages * sizes["virtual_layers"])
    if rest or not virtual:
        msg = (
            f"{file}: {keys['layers'][0]} is {sizes['layers']}, not a multiple of {stages} stages times "
            f"{keys['virtual_layers'][0]}, which is {sizes['virtual_layers']}; correct one of them"
        )
        raise InputError(msg)
    return virtual


def _axes(document: Document, mesh: Mapping[str, int]) -> tuple[dict[str, str], dict[str, int]]:
    """Return the keys of axes, and the sizes of all axes that the document or the user names."""
    keys, sizes = {}, dict(mesh)
    for key, value in document.values.items():
        axis = AXIS_KEYS.get(key.rpartition(".")[2])
        if axis is None or _names_no_axes(document) or value == -1:
            continue
        if not _is_size(value):
            msg = f"{document.name}: {key} is {value!r}; it must be an integer of at least 1"
            raise InputError(msg)
        if mesh.get(axis, value) != value:
            msg = f"--mesh says {axis}={mesh[axis]}, but {document.name} has {key} {value}; leave one of them out"
            raise InputError(msg)
        keys[key], sizes[axis] = axis, value
    if document.format == "torchtitan" and not keys:
        msg = (
            f"{document.name} cannot be reduced as {FORMATS['torchtitan']}: it has no size of an axis, such as "
            "parallelism.tensor_parallel_degree"
        )
        raise InputError(msg)
    return keys, sizes


def _small_axes(axes: Mapping[str, int], form: str, keys: int) -> dict[str, tuple[int, int]]:
    """Return each axis with its size in the small run: 2, or the least odd prime that divides it.

    If the frameworks permit it, the data-parallel axis has size 3 where the tensor-parallel axis has size 2, so that
    the use of the wrong group is detected. Experts need an even number of ranks, and MindSpore's parallel modes a power
    of two. In two cases an axis is a product of two such numbers, since a smaller axis would hide bugs: several
    tensor-parallel ranks share each of several key heads, or several groups of data-parallel ranks have the experts.

    Args:
        axes: the axes of the large run.
        form: format of the document.
        keys: number of key heads; 1 if it is unknown.
    """
    found = {axis: (size, _small(size)) for axis, size in axes.items()}
    if 1 < keys < axes["tp"] and axes["tp"] % keys == 0:
        found["tp"] = (axes["tp"], _small(keys) * _small(axes["tp"] // keys))
    data = next((axis for axis in ("dp_shard", "dp") if axes[axis] > 1), "dp")
    if axes["ep"] > 1 and axes[data] % axes["ep"] == 0:
        found[data] = (axes[data], found["ep"][1] * _small(axes[data] // axes["ep"]))
    if found["tp"][1] == 2 and found["ep"][1] == 1 and form != "mindformers":
        found |= {axis: (found[axis][0], 3) for axis in ("dp", "dp_shard") if found[axis][0] > 2 == found[axis][1]}
    return found


def _small(size: int) -> int:
    """Return 2, or the least odd prime that divides a size; 1 for 1."""
    return next((prime for prime in range(3, size + 1, 2) if size % prime == 0), min(size, 2))


def _roles(document: Document, model: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of the model that have a role."""
    for key, value in document.values.items():
        last = key.rpartition(".")[2]
        role = ROLES[document.format].get(last)
        if role is not None and value is not None and (not _names_no_axes(document) or key == model + last):
            yield key, role


def _has(document: Document, model: str, role: str) -> bool:
    return any(other == role for _, other in _roles(document, model))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _one_size(document: Document, keys: list[str]) -> int:
    """Return the number that all keys of a role have; 0 if a key states that there is none."""
    found: dict[str, Any] = {key: document.values[key] for key in keys}
    for key, value in found.items():
        if not _is_size(value) and value not in (0, False):
            msg = f"{document.name}: {key} is {value!r}; it must be an integer of at least 1"
            raise InputError(msg)
    if len(set(found.values())) > 1:
        said = " and ".join(f"{key} is {value}" for key, value in found.items())
        msg = f"{document.name}: {said}, although they mean the same; leave one of them out"
        raise InputError(msg)
    return int(found[keys[0]])


def _head_dim(file: str, sizes: Mapping[str, int], keys: Mapping[str, list[str]]) -> int:
    hidden, heads = sizes["hidden"], sizes["heads"]
    if hidden % heads:
        msg = (
            f"{file}: {keys['hidden'][0]} is {hidden}, not a multiple of {keys['heads'][0]}, which is {heads}; correct "
            "one of them, or add head_dim"
        )
        raise InputError(msg)
    return hidden // heads
