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
    """Run ``module`` as a forward and a backward graph, which are traced through its DTensors.

    The graphs contain the operators of PyTorch on local tensors and the collectives, in the order of the uncompiled
    module and bitwise equal to it. They are traced when the module is first called with tensors of new shapes, layouts,
    dtypes or requires_grad, with other plain arguments, after an attribute of it or a submodule has changed, or in
    another mode (train, ``no_grad``, autocast); at most 64 graphs are kept. Random numbers of DTensors are those of the
    uncompiled module.

    Apply a plan before compiling. The module's own hooks run outside of the graphs, so ``fully_shard`` and
    ``replicate`` may be applied to the module before or after. Recomputation must surround the module, because graphs
    keep all activations. Calls run uncompiled, one by one, while something observes them: ``record_events``,
    ``strict``, ``defer_grad_reduce``, modes that see each operator, global hooks, inference mode.

    Everything that a graph cannot contain is refused: values that decide what is computed (``item()``, masks as
    indices), messages between two ranks, attributes or arguments that forward writes, tensors that are neither
    arguments nor parameters nor buffers, hooks of submodules. Other things that forward reads, such as global
    variables, must not change.

    Args:
        module: the module, which is changed in place.
        backend: by default the graphs run operator by operator, bitwise equal to the uncompiled module. ``"inductor"``
            fuses operators, within its tolerance, and takes seconds for each graph. Otherwise a function of a
            ``torch.fx.GraphModule`` of ATen operators and examples of its inputs.

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
