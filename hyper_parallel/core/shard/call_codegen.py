"""Generates one closure per argument pattern of a call: which arguments are converted to local tensors, and how.

A closure's code is generated from the pattern, as ``dataclasses`` generates methods, so that no call loops over its
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from hyper_parallel._caches import register

if TYPE_CHECKING:
    from hyper_parallel.core.shard.entry import Run

__all__ = ["CONVERTED", "LOCAL", "SAME", "UNWRAPPED", "VIEW", "WRAPPED", "call_form"]

SAME, LOCAL, CONVERTED = "same", "local", "converted"
"""An argument of the local call is the caller's argument, its local tensor, or the result of a converter."""
UNWRAPPED, WRAPPED, VIEW = "unwrapped", "wrapped", "view"
"""What the call returns: the framework's result, a DTensor of it, or a DTensor only if the first argument is writable.
"""

_OUTPUTS = {
    UNWRAPPED: ((), "{}"),
    WRAPPED: (("wrap", "layout"), "wrap({}, layout)"),
    VIEW: (
        ("wrap", "layout", "otherwise"),
        "wrap({}, layout) if args[0]._readonly is None else otherwise(args, kwargs)",
    ),
}
"""By kind of output: additional parameters of the function that makes the closure, and the closure's result."""


@lru_cache(maxsize=1024)
def call_form(positional: tuple[str, ...], named: tuple[tuple[str, str], ...], output: str) -> Callable[..., Run]:
    """Return the function that makes the closures of calls of one pattern.

    Args:
        positional: kinds of the positional arguments of the local call.
        named: names of the keyword arguments, which are parameters, with their kinds.
        output: kind of the result.

    Returns:
        a function with these parameters: the framework's function; unless ``output`` is UNWRAPPED, the function that
        wraps a result, and the layout to pass to it; if ``output`` is VIEW, the closure for calls with a read-only
        first argument; and the converters, in the order of the arguments.
    """
    targets = [*("" for _ in positional), *(f"{name}=" for name, _ in named)]
    places = [*(f"args[{index}]" for index in range(len(positional))), *(f"kwargs[{name!r}]" for name, _ in named)]
    values: list[str] = []
    converters: list[str] = []
    for target, place, argument in zip(targets, places, [*positional, *(kind for _, kind in named)], strict=True):
        if argument == CONVERTED:
            converters.append(f"convert_{len(converters)}")
            values.append(f"{target}{converters[-1]}({place})")
        else:
            values.append(f"{target}{place}._local" if argument == LOCAL else f"{target}{place}")
    parameters, body = _OUTPUTS[output]
    result = body.format(f"func({', '.join(values)})")
    text = f"lambda {', '.join(['func', *parameters, *converters])}: lambda args, kwargs: {result}"
    return eval(text, {})  # type: ignore[no-any-return]  # noqa: S307 - generated above from indices and parameter names


register("forms of calls", call_form)
