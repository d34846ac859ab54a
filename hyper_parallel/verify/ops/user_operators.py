"""Loads operators from a user's file."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.core.shard.rule import rule_names
from hyper_parallel.core.shard.sample import Sample
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.spec import blame_user

__all__ = [
    "UserOperator",
    "load_user_file",
    "operator_sample",
    "resolve",
    "samples_of_user",
    "user_rules",
]


@dataclass(frozen=True)
class UserOperator:
    """Reference to a function of a user's file by its name; ranks in other processes load the file again.

    Attributes:
        file: path.
        name: name of the function, unique in the file.
    """

    file: str
    name: str


_LOCK = threading.RLock()
_DECLARED: dict[str, tuple[Callable[..., Any], list[Sample]]] = {}
_LOADED: dict[str, tuple[dict[str, tuple[Callable[..., Any], list[Sample]]], list[str]]] = {}


def operator_sample(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Declare a sample call with which ``hyper-parallel verify ops FILE`` checks ``fn``.

    Args:
        fn: the function, which takes plain tensors and DTensors.
        args: positional arguments. Operands are declared by kind of values and shape: ``real("ab")``,
            ``indices("v", "ab")``; each letter is a size.
        kwargs: keyword arguments, in the same form.
    """
    name = str(getattr(fn, "__name__", None) or getattr(fn, "_op_name", None) or fn)
    with _LOCK:
        _DECLARED.setdefault(name, (fn, []))[1].append(Sample(args, kwargs))


def load_user_file(platform: str, path: str) -> dict[str, UserOperator]:
    """Run the file once, and return the functions for which it declares samples, by name.

    Raises:
        ValueError: there is no such file.
        InputError: the file raises an exception; the message names the line.
    """
    _load(platform, path)
    functions, _ = _LOADED[path]
    return {name: UserOperator(path, name) for name in functions}


def user_rules(platform: str, path: str) -> list[str]:
    """Return the names of the rules that the file registers."""
    _load(platform, path)
    return _LOADED[path][1]


def _load(platform: str, path: str) -> None:
    with _LOCK:
        if path in _LOADED:
            return
        file = Path(path)
        if not file.is_file():
            msg = f"{path}: no such file"
            raise ValueError(msg)
        platform_named(platform)  # registers the library's rules before those of the file
        before = set(rule_names())
        _DECLARED.clear()
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(file.stem, module)
        with use_platform(platform), blame_user(f"FILE {path!r}"):
            spec.loader.exec_module(module)
        _LOADED[path] = (dict(_DECLARED), [name for name in rule_names() if name not in before])


def resolve(platform: str, user: UserOperator) -> Callable[..., Any]:
    """Return the function of a user operator."""
    _load(platform, user.file)
    return _LOADED[user.file][0][user.name][0]


def samples_of_user(user: UserOperator) -> tuple[Sample, ...]:
    """Return the samples that the file declares for the function."""
    return tuple(_LOADED[user.file][0][user.name][1])
