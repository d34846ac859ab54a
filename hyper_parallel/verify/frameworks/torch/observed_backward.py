"""Observes backward, hooks of gradients, ``autograd.Function`` and methods of DTensors, for ``prove plan``.

A torch function mode does not observe these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hyper_parallel.platform.torch.dtensor import TorchDTensor
from hyper_parallel.platform.torch.intercept import interception
from hyper_parallel.platform.torch.versions import function_apply
from hyper_parallel.verify.frameworks.contract.replacing import LIBRARY, called_from, replaced

__all__ = ["observed_backward", "observed_methods"]

_PYTORCH = str(Path(torch.__file__).parent)
_IDENTITY = "torch.nn.modules._functions"
"""Module with the ``autograd.Function`` classes that PyTorch inserts to run hooks of modules; they change no value."""

_HOOKS = {
    (Tensor, "register_hook"): "hooked",
    (TorchDTensor, "register_hook"): "hooked",
    (Tensor, "register_post_accumulate_grad_hook"): "hooked_after",
    (TorchDTensor, "register_post_accumulate_grad_hook"): "hooked_after",
    (nn.Module, "register_full_backward_hook"): "hooked_module",
    (nn.Module, "register_full_backward_pre_hook"): "hooked_module",
}
"""Functions that register a hook, each with the method of ``Program`` that wraps the hook."""


@contextmanager
def observed_backward(program: Any, calls: Any) -> Iterator[None]:
    """Inside this context, report backward and the other calls of this module to ``program``.

    Args:
        program: a ``verify.prove.program.Program``.
        calls: context manager in which the calls of hooks are observed.
    """
    seeds: list[Any] = []
    registering: list[Any] = []
    functions: dict[tuple[Any, str], Any] = {
        place: _registering(getattr(*place), getattr(program, method), calls, registering)
        for place, method in _HOOKS.items()
    }
    backward, of_dtensor, apply = torch.autograd.backward, TorchDTensor.backward, function_apply()
    running: list[Any] = []

    def observed(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        again = bool(running) and running[-1] is tensors  # a torch function mode repeats the call
        by_library = called_from(LIBRARY)
        own = again or (by_library and not seeds)  # the library runs backward to reduce a deferred gradient
        given = seeds.pop() if seeds and by_library and not own else grad_tensors
        roots, cotangents = ([each] if isinstance(each, Tensor) or each is None else list(each)
                             for each in (tensors, given))  # fmt: skip
        running.append(tensors)
        try:
            with nullcontext() if own else program.backward(roots, cotangents, by_library=by_library):
                backward(tensors, grad_tensors, *args, **kwargs)
        finally:
            running.pop()

    def observed_of_dtensor(tensor: Any, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
        seeds.append(gradient)
        try:
            of_dtensor(tensor, gradient, *args, **kwargs)
        finally:
            seeds.clear()

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = apply(cls, *args, **kwargs)
        if cls.__module__ == _IDENTITY:
            results = result if isinstance(result, tuple) else (result,)
            for one, other in zip(results, (each for each in args if isinstance(each, Tensor)), strict=False):
                program.same(one, other)
        elif not cls.__module__.startswith("hyper_parallel."):
            codes = tuple(getattr(getattr(cls, name), "__code__", None) for name in ("forward", "backward"))
            program.called((cls.__qualname__, codes), cls.__name__, args, kwargs, result)
        return result

    data: Any = vars(TorchDTensor)["data"]
    functions[TorchDTensor, "data"] = property(_data_of(program, data.fget), _set_data_of(program, data.fset))
    functions |= {
        (torch.autograd, "backward"): observed,
        (TorchDTensor, "backward"): observed_of_dtensor,
        (torch.autograd.Function, "apply"): classmethod(applied),
        (saved_tensors_hooks, "__init__"): _hooks_of_saved_tensors(program),
        (torch.autocast, "__enter__"): _autocast(program),
    }
    with replaced(functions):
        yield


def observed_methods() -> AbstractContextManager[None]:
    """Replace those DTensor methods that a torch function mode would not see by PyTorch's."""
    entries, found = interception().functions, dict[tuple[Any, str], Any]()
    for name in ("detach", *dir(Tensor)):
        func = getattr(Tensor, name, None)
        if name in vars(TorchDTensor) and callable(func) and (name == "detach" or entries.get(func) is not None):
            found[TorchDTensor, name] = func
    return replaced(found)


def _data_of(program: Any, data: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(tensor: Any) -> Any:
        result = data(tensor)
        program.share(tensor, result)
        return result

    return read


def _set_data_of(program: Any, set_data: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def write(tensor: Any, value: Any) -> None:
        set_data(tensor, value)
        program.set(tensor, program.number(value))

    return write


def _autocast(program: Any) -> Callable[..., Any]:
    """Return the start of an autocast region, which is noted, because it does not act on meta tensors."""
    enter: Any = vars(torch.autocast)["__enter__"]

    def noted(region: Any) -> Any:
        result = enter(region)
        if torch.is_autocast_enabled(region.device):
            program.noted(f"a region of autocast to {region.fast_dtype}", region.device)
        return result

    return noted


def _hooks_of_saved_tensors(program: Any) -> Callable[..., None]:
    """Return the constructor of ``saved_tensors_hooks``, which notes the hooks of a user's file."""
    init: Any = vars(saved_tensors_hooks)["__init__"]

    def noted(hooks: Any, pack: Any, unpack: Any) -> None:
        init(hooks, pack, unpack)
        if not called_from(LIBRARY, _PYTORCH):
            program.noted("a hook of saved tensors", [getattr(each, "__code__", each) for each in (pack, unpack)])

    return noted


def _registering(
    register: Callable[..., Any], hooked: Callable[..., Any], calls: Any, running: list[Any]
) -> Callable[..., Any]:
    def call(owner: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
        if running or called_from(LIBRARY):  # a registration by another registering function, or by the library
            return register(owner, hook, *args, **kwargs)
        running.append(owner)
        try:
            return register(owner, hooked(owner, hook, lambda: calls), *args, **kwargs)
        finally:
            running.pop()

    return call
