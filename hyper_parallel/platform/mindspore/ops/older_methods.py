"""Methods of tensors in older spellings, such as ``x.chunk(2, axis=1)``, which reach dispatch as ``DeprecatedChunk``.

Behind each is a function of MindSpore in Python, which runs as it is: the functions that it calls are dispatched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mindspore.ops import tensor_method

from hyper_parallel.platform.mindspore.ops.registry import decomposition

__all__ = ["METHODS"]

METHODS = (
    "chunk", "expand_as", "flatten", "index_select", "isclose", "matmul", "nansum", "narrow", "remainder", "select",
    "split", "sub", "tile", "unsqueeze", "view_as", "where",
)  # fmt: skip
"""Names of the methods."""


def _run(function: Callable[..., Any], ops: Any, primitive: Any, *args: Any, **kwargs: Any) -> Any:
    del ops, primitive
    return function(*args, **kwargs)


for method in METHODS:
    name = "Deprecated" + "".join(map(str.capitalize, method.split("_")))
    decomposition(name)(partial(_run, getattr(tensor_method, f"deprecated_tensor_{method}")))
