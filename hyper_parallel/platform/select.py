"""Selects the framework; the only way to get a platform.

Order: an explicit choice (a call or ``use_platform``), the environment variable, the only framework that this process
has imported, MindSpore if it is installed, PyTorch. Code that has a tensor calls :func:`platform_of` instead.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import ArgumentTypeError, HyperParallelError
from hyper_parallel.platform.tested import older_than_supported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hyper_parallel.platform.contract.platform import Platform

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "FRAMEWORKS",
    "INSTALL",
    "MissingFrameworkError",
    "chosen_framework",
    "current_platform",
    "default_framework",
    "framework_for",
    "framework_of",
    "frameworks_used_by",
    "get_mindspore_platform",
    "get_platform",
    "get_torch_platform",
    "installed_frameworks",
    "platform_named",
    "platform_of",
    "platform_of_argument",
    "require_framework",
    "use_platform",
    "value_and_grad",
]

ENVIRONMENT_VARIABLE = "HYPER_PARALLEL_PLATFORM"
FRAMEWORKS = ("torch", "mindspore")
INSTALL = {
    "torch": "pip install 'torch>=2.10' 'safetensors>=0.8'",
    "mindspore": "pip install 'mindspore>=2.8' 'safetensors>=0.8'",
}
"""The commands that install a framework for this package, in the versions of its extra in ``pyproject.toml``."""

_BUILT: dict[str, Platform] = {}
_LOCK = threading.RLock()
_CHOSEN: ContextVar[str | None] = ContextVar("hyper_parallel_platform", default=None)


class MissingFrameworkError(HyperParallelError, ImportError):
    """The framework that was chosen cannot be imported."""


def get_platform() -> Platform:
    """Return the platform of this thread or task.

    Raises:
        ValueError: the environment variable does not name a framework.
        MissingFrameworkError: (an ImportError) neither framework is installed, or the chosen one is not.
    """
    chosen = _CHOSEN.get()
    return platform_named(chosen if chosen is not None else default_framework())


def get_torch_platform() -> Platform:
    """Return PyTorch's platform."""
    return platform_named("torch")


def get_mindspore_platform() -> Platform:
    """Return MindSpore's platform."""
    return platform_named("mindspore")


current_platform = get_platform


def value_and_grad(
    fn: Callable[..., Any],
    grad_position: int | Sequence[int] | None = 0,
    weights: Any = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Return ``mindspore.value_and_grad`` of ``fn``, with gradients of DTensors as DTensors in the dual layout.

    Args:
        fn: a function or Cell whose first output is differentiated; partial values of the output are reduced.
        grad_position: indices of the positional arguments to differentiate with respect to.
        weights: parameters to differentiate with respect to.
        has_aux: True to differentiate only the first output and return the others unchanged.

    Returns:
        a function of the arguments of ``fn`` that returns the outputs and the gradients, nested as in MindSpore.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) on PyTorch, where ``loss.backward()`` does this.
        ArgumentTypeError: (a TypeError) the returned function got a tensor of PyTorch, which MindSpore treats as a
            constant.
    """
    run = get_platform().value_and_grad(fn, grad_position, weights, has_aux)

    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for position, value in enumerate(args):
            if framework_of(value) == "torch":
                msg = (
                    f"value_and_grad ran on mindspore, and argument {position} is a {type(value).__name__} of torch; "
                    "on PyTorch call loss.backward() and read .grad, and set HYPER_PARALLEL_PLATFORM=torch if both "
                    "frameworks are imported"
                )
                raise ArgumentTypeError(msg)
        return run(*args, **kwargs)

    return differentiated


@contextmanager
def use_platform(name: str) -> Iterator[Platform]:
    """Use platform ``name`` inside this context, for the current thread or task."""
    platform = platform_named(name)
    token = _CHOSEN.set(name)
    try:
        yield platform
    finally:
        _CHOSEN.reset(token)


def platform_named(name: str) -> Platform:
    """Return the platform of framework ``name``, which is built on first use."""
    built = _BUILT.get(name)
    if built is not None:
        return built
    if name not in FRAMEWORKS:
        msg = f"unknown platform {name!r}; known: {', '.join(FRAMEWORKS)}"
        raise ValueError(msg)
    with _LOCK:
        if name not in _BUILT:
            require_framework(name)
            _BUILT[name] = _build(name)
    return _BUILT[name]


def _build(name: str) -> Platform:
    """Import a framework and build its platform.

    Raises:
        MissingFrameworkError: (an ImportError) the framework is installed incompletely, or is too old.
    """
    try:
        framework = importlib.import_module(name)
    except Exception as error:  # of any type: a broken file is a SyntaxError, another NumPy a ValueError
        msg = f"{name} is installed, but cannot be imported: {_line(error)}; hyper-parallel doctor says more"
        raise MissingFrameworkError(msg) from error
    try:
        platform: Platform = importlib.import_module(f"hyper_parallel.platform.{name}.platform").build()
    except (ImportError, AttributeError) as error:
        older = older_than_supported(name, str(getattr(framework, "__version__", "")))
        if not older:
            if (getattr(error, "name", None) or "").partition(".")[0] != name:
                raise
            msg = f"{name} is installed, but lacks what is needed: {_line(error)}; hyper-parallel doctor says more"
            raise MissingFrameworkError(msg) from error
        msg = f"{older}: {_line(error)}; {INSTALL[name]}"
        raise MissingFrameworkError(msg) from error
    return platform


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def framework_of(value: Any) -> str:
    """Return the name of the framework that has the type of a value, or a base of it; nothing for other values.

    Args:
        value: anything; a type stands for its instances.
    """
    for base in (value if isinstance(value, type) else type(value)).__mro__:
        name = base.__module__.partition(".")[0]
        if name in FRAMEWORKS:
            return name
    return ""


def platform_of(value: Any) -> Platform:
    """Return the platform of a tensor or module.

    Raises:
        TypeError: no framework in this process knows the type.
    """
    name = framework_of(value)
    if name:
        return platform_named(name)
    msg = f"expected a tensor of {' or '.join(FRAMEWORKS)}, got {type(value).__name__}"
    raise TypeError(msg)


def platform_of_argument(value: Any, what: str, *, module: bool = False) -> Platform:
    """Return the platform of a user's argument; ``what`` names it, as in ``"distribute_tensor: tensor"``.

    Raises:
        ArgumentTypeError: (a TypeError) ``value`` is not a tensor, or not a module, of either framework.
    """
    try:
        platform = platform_of(value)
    except TypeError:
        platform = None
    if platform is not None and (isinstance(value, platform.Module) if module else platform.is_tensor(value)):
        return platform
    wanted = "a torch.nn.Module or a mindspore.nn.Cell" if module else "a tensor of torch or mindspore"
    fix = "" if module else "; convert it first, as in torch.tensor(data) or mindspore.Tensor(data)"
    msg = f"{what} must be {wanted}, got {type(value).__name__}{fix}"
    raise ArgumentTypeError(msg)


def installed_frameworks() -> tuple[str, ...]:
    """Return the names of the frameworks that could be imported, without importing them."""
    return tuple(name for name in FRAMEWORKS if name in sys.modules or _has_package(name))


def _has_package(name: str) -> bool:
    """Whether a package has this name; a folder without modules is not one, although Python would import it."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def default_framework() -> str:
    """Return the framework used when none is chosen explicitly, without importing it.

    Raises:
        ValueError: the environment variable does not name a framework.
        MissingFrameworkError: (an ImportError) neither is installed.
    """
    requested = os.environ.get(ENVIRONMENT_VARIABLE)
    if requested:
        if requested.lower() not in FRAMEWORKS:
            msg = f"{ENVIRONMENT_VARIABLE}={requested!r} is not a framework; use one of {', '.join(FRAMEWORKS)}"
            raise ValueError(msg)
        return requested.lower()
    imported = [name for name in FRAMEWORKS if name in sys.modules]
    if len(imported) == 1:
        return imported[0]
    installed = installed_frameworks()
    if not installed:
        msg = "neither PyTorch nor MindSpore is installed; one of them is needed: " + ", or ".join(INSTALL.values())
        raise MissingFrameworkError(msg)
    return "mindspore" if "mindspore" in installed else "torch"


def chosen_framework() -> str:
    """Return the framework that ``use_platform`` or the environment variable chooses; empty if neither does.

    Raises:
        ValueError: the environment variable does not name a framework.
    """
    return _CHOSEN.get() or (default_framework() if os.environ.get(ENVIRONMENT_VARIABLE) else "")


def framework_for(function: Callable[..., Any], arguments: Sequence[Any] = ()) -> str:
    """Return the framework on which ranks call ``function`` where the caller names none; imports neither.

    In this order: ``use_platform``, the environment variable, the only framework of tensors and modules among the
    arguments, the only framework that the function's module uses by name, :func:`default_framework`.
    """
    chosen = chosen_framework()
    if chosen:
        return chosen
    for named in ({framework_of(argument) for argument in arguments} - {""}, set(frameworks_used_by(function))):
        if len(named) == 1:
            return named.pop()
    return default_framework()


def frameworks_used_by(function: Callable[..., Any]) -> list[str]:
    """Return the frameworks from which the module of a function has imported a module, a class or an object."""
    while isinstance(function, functools.partial):
        function = function.func
    values = list(getattr(function, "__globals__", {}).values())
    modules = {value.__name__.partition(".")[0] for value in values if isinstance(value, ModuleType)}
    used = modules | {framework_of(value) for value in values}
    return [name for name in FRAMEWORKS if name in used]


def require_framework(name: str) -> None:
    """Raise unless framework ``name`` could be used; imports neither.

    Raises:
        MissingFrameworkError: (an ImportError) it is not installed.
    """
    if name not in installed_frameworks():
        msg = f"{name} is needed, but not installed; {INSTALL[name]}"
        raise MissingFrameworkError(msg)
