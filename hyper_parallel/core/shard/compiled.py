"""``compile``: runs a module as graphs of local operators and collectives, without dispatch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import platform_of_argument

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["compile"]

ModuleT = TypeVar("ModuleT")

_COMPILED = "_hyper_parallel_compiled"


def compile(  # noqa: A001 - as torch.compile
    module: ModuleT, *, backend: Callable[..., Any] | str | None = None
) -> ModuleT:
    """Run ``module`` as a forward and a backward graph, traced through its DTensors.

    The graphs contain PyTorch operators on local tensors and collectives, in the order of the uncompiled module, so
    results are bitwise equal. A graph is traced at the first call with new shapes, layouts, dtypes, requires_grad or
    plain arguments, after an attribute of the module or of a submodule has changed, and per mode (train, ``no_grad``,
    autocast); at most 64 graphs are kept. Random numbers of DTensors equal those of the uncompiled module.

    Apply a plan before compiling. The module's own hooks run outside of the graphs, so ``fully_shard`` and
    ``replicate`` may be applied to the module before or after. Recomputation must surround the module, because graphs
    keep all activations. Calls run uncompiled, one by one, while something observes them: ``record_events``,
    ``strict``, ``defer_grad_reduce``, modes that see each operator, global hooks, inference mode.

    What a graph cannot contain is refused: values that decide what is computed (``item()``, masks as indices), messages
    between two ranks, attributes or arguments that forward writes, hooks of submodules, and tensors that are not
    arguments, parameters or buffers. Other things that forward reads, such as global variables, must not change.

    Args:
        module: the module, which is changed in place.
        backend: by default the graphs run operator by operator, bitwise equal to the uncompiled module. ``"inductor"``
            fuses operators, with its own rounding, and compiles each graph for seconds. Otherwise a function of a
            ``torch.fx.GraphModule`` of ATen operators and example inputs.

    Returns:
        ``module``.

    Raises:
        ArgumentTypeError: (a TypeError and a RuntimeError) ``backend`` is neither a known name nor a function.
        PlanError: (a ValueError) the module was compiled before, or ``fully_shard`` was applied to a submodule.
        UnsupportedOnBackend: (a NotImplementedError) on MindSpore.
    """
    platform = platform_of_argument(module, "compile: module", module=True)
    if _COMPILED in vars(module):
        msg = f"compile was applied to this {type(module).__name__} before; apply it once"
        raise PlanError(msg)
    platform.compiled_forward(module, backend)
    setattr(module, _COMPILED, True)
    return module
