"""What a configuration says of its model and mesh: sizes by role, the pattern of layers, axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.reduce.document import Document
from hyper_parallel.verify.reduce.keys import AXES, FORMATS, NEEDED, PERIODS, POSITIONS, ROLES
from hyper_parallel.verify.reduce.layers import Pattern

__all__ = ["Structure", "read_structure"]

_ASSUMED = {"tp": "hidden", "ep": "experts"}
"""Axes that are taken to be 2 where nothing names axes, and what they divide."""
_MODEL = ("", "text_config.")
"""Where a config may have its language model."""


@dataclass(frozen=True)
class Structure:
    """A model and its mesh.

    Attributes:
        document: that says so.
        model: what the keys of the model begin with.
        sizes: by role; that of a head is there although some files leave it out.
        keys: the keys of each role.
        pattern: of the layers.
        positions: numbers of tokens, by key.
        axes: of the mesh, by name: size in the large run and in the small one.
        assumed: axes that nothing names.
    """

    document: Document
    model: str
    sizes: Mapping[str, int]
    keys: Mapping[str, list[str]]
    pattern: Pattern
    positions: Mapping[str, int]
    axes: Mapping[str, tuple[int, int]]
    assumed: tuple[str, ...]

    def first_keys(self) -> dict[str, str]:
        """Return a key of each role, for messages."""
        return {role: keys[0] for role, keys in self.keys.items()} | {"kv_heads": self._key("kv_heads", "heads")}

    def _key(self, *roles: str) -> str:
        return next(self.keys[role][0] for role in roles if role in self.keys)


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
            names = [key for key, other in ROLES[document.format].items() if other == role]
            msg = f"{document.name} is not a {FORMATS[document.format]} that can be reduced: it has no {names[0]}" + (
                f" ({', '.join(names[1:])})" if names[1:] else ""
            )
            raise InputError(msg)
    if "kv_lora" not in sizes:
        sizes.setdefault("kv_heads", sizes["heads"])
        if "head_dim" not in sizes:
            sizes["head_dim"] = _head_dim(document.name, sizes, keys)
    lists = {
        key: value
        for key, value in document.values.items()
        if key.startswith(model) and isinstance(value, list) and len(value) == sizes["layers"] > 1
    }
    numbers = {key: value for key, value in document.values.items() if key.startswith(model) and _is_size(value)}
    periods = {key: value for key, value in numbers.items() if key.rpartition(".")[2] in PERIODS}
    positions = {key: value for key, value in numbers.items() if key.rpartition(".")[2] in POSITIONS}
    pattern = Pattern(sizes["layers"], sizes.get("dense_layers", 0), periods, lists)
    assumed = tuple(axis for axis, role in _ASSUMED.items() if role in sizes and not mesh)
    axes = {axis: _small(mesh.get(axis, 2 if axis in assumed else 1)) for axis in AXES}
    return Structure(document, model, sizes, keys, pattern, positions, axes, assumed)


def _small(size: int) -> tuple[int, int]:
    """Return the size of an axis, and its size in the small run: 2, or the least odd prime that divides it."""
    return size, next((prime for prime in range(3, size + 1, 2) if size % prime == 0), min(size, 2))


def _roles(document: Document, model: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of the model that have a role."""
    for key, value in document.values.items():
        role = ROLES[document.format].get(key.rpartition(".")[2])
        if role is not None and value is not None and key.rpartition(".")[0] == model.rstrip("."):
            yield key, role


def _has(document: Document, model: str, role: str) -> bool:
    return any(other == role for _, other in _roles(document, model))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _one_size(document: Document, keys: list[str]) -> int:
    """Return the number that all keys of a role have; 0 where it says that there is none."""
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
