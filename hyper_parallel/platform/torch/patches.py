"""Every patch of PyTorch, with its reason and the versions that need it.

``PATCHES`` is the list to check when PyTorch is upgraded: a test fails on a version for which the reasons have not been
checked. Where no DTensor is involved, each patch calls the original. If a version lacks the attribute, nothing is
replaced, and a warning names the feature that is lost.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from inspect import getattr_static, signature, unwrap
from types import ClassMethodDescriptorType, CodeType, FunctionType
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad, convert_parameters, parametrize
from torch.utils import checkpoint
from torch.utils.hooks import BackwardHook

from hyper_parallel._versions import Missing
from hyper_parallel.core.dtensor import random
from hyper_parallel.platform.contract.memory import replayable, replayable_constructor
from hyper_parallel.platform.tested import TESTED
from hyper_parallel.platform.torch.after_import import after_import
from hyper_parallel.platform.torch.autograd import apply_function, dispatched_backward, grad
from hyper_parallel.platform.torch.compiled import (
    compile_around_dtensors,
    configure_loaded_compiler,
    reset_keeping_settings,
)
from hyper_parallel.platform.torch.deferred_hooks import edge_of, node_of
from hyper_parallel.platform.torch.dtensor import TorchDTensor
from hyper_parallel.platform.torch.module_hooks import (
    entered_by_rank,
    hooks_with_dtensors,
    of_entering_rank,
    refuse_old_hooks,
)
from hyper_parallel.platform.torch.optimizer_steps import on_local_tensors, sparse_on_local_tensors
from hyper_parallel.platform.torch.parameter_utilities import (
    clipped_on_all_meshes,
    masks_of_whole_tensors,
    norm_on_all_meshes,
    on_whole_tensors,
    set_in_own_layout,
    vector_into_dtensors,
)
from hyper_parallel.platform.torch.pytorch_data_parallel import (
    constructor_without_dtensors,
    managed_without_dtensors,
    with_their_mesh,
)
from hyper_parallel.platform.torch.region_run import refuse_second_derivative
from hyper_parallel.platform.torch.replicated_factories import DISTRIBUTIONS, draws_alike
from hyper_parallel.platform.torch.script_groups import built_within_the_limit, group_of_mesh, received_apart
from hyper_parallel.platform.torch.sharded_schedule import abandon_failed_backward
from hyper_parallel.platform.torch.state_dicts import (
    broadcasting_to_shards,
    distributing_to_shards,
    gathering_dtensors,
    going_into_dtensors,
    staging_dtensors,
)
from hyper_parallel.platform.torch.storage_format import (
    functions_of_masked,
    pair_with_storage_format,
    with_storage_format,
)
from hyper_parallel.platform.torch.versions import (
    CheckpointFrame,
    CheckpointInputs,
    Orthogonal,
    TensorLikePair,
    current_graph_task_id,
    function_mode_enabled,
    functional_collectives,
    group_resolvers,
    masked_functions,
    mesh_readers,
    not_dispatched,
    optim_functional,
)

__all__ = ["LATE_PATCHES", "PATCHES", "Patch", "install"]

Call = Callable[..., Any]
_ORIGINAL = "_hyper_parallel_original"


@dataclass(frozen=True)
class Patch:
    """An attribute of PyTorch that is replaced.

    Attributes:
        places: owner (a module or class) and name of each attribute that has the function.
        replace: makes the replacement of the original function.
        reason: the reason why PyTorch's original does not work.
        versions: versions of PyTorch for which the reason was checked.
        references: replace the code of the function instead of the attribute, so that references taken earlier call the
            replacement, too; only for functions without a closure.
    """

    places: tuple[tuple[Any, str], ...]
    replace: Callable[[Call], Call]
    reason: str
    versions: tuple[str, ...] = TESTED["torch"]
    references: bool = False

    def install(self) -> None:
        """Replace the function; idempotent."""
        owner, name = self.places[0]
        if isinstance(owner, Missing) or getattr_static(owner, name, None) is None:
            self._warn_of_missing()
            return
        static = getattr_static(owner, name)
        kinds = {classmethod: classmethod, ClassMethodDescriptorType: classmethod, staticmethod: staticmethod}
        method: Any = kinds.get(type(static))
        original = getattr(
            static, "__func__", static
        )  # a native class method is called with the class, like a function
        if hasattr(original, _ORIGINAL):
            return
        if self.references:
            inner = unwrap(original)  # a function in a decorator, or in a wrapper that exists while simulated ranks run
            _replace_code(inner, self.replace)
            setattr(original, _ORIGINAL, getattr(inner, _ORIGINAL))
            return
        replacement = self.replace(original)
        setattr(replacement, _ORIGINAL, original)
        for owner, name in self.places:
            setattr(owner, name, replacement if method is None else method(replacement))

    def _warn_of_missing(self) -> None:
        owner, name = self.places[0]
        place = f"PyTorch {torch.__version__} has no {getattr(owner, '__name__', owner)}.{name}"
        text = owner.message if isinstance(owner, Missing) else place
        warnings.warn(f"{text}; it would be replaced, because {self.reason}", stacklevel=2)


def _replace_code(function: FunctionType, replace: Callable[[Call], Call]) -> None:
    """Change ``function`` itself to call its replacement."""
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    function.__signature__ = signature(original)  # type: ignore[attr-defined] # what inspect reads
    name = f"_hyper_parallel_{function.__name__}"
    function.__globals__[name] = replace(original)
    setattr(function, _ORIGINAL, original)
    function.__code__ = _calling(name)


def _calling(name: str) -> CodeType:
    """The code of a function that calls the global function ``name`` of its module."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return replaced(*args, **kwargs)  # type: ignore[name-defined] # noqa: F821 - it gets its name below

    code = call.__code__
    return code.replace(co_names=tuple(name if used == "replaced" else used for used in code.co_names))


def install() -> None:
    """Apply every patch; idempotent."""
    for patch in PATCHES:
        patch.install()
    for module, late in LATE_PATCHES.items():
        after_import(module, partial(_install_late, late))
    random.forbid_sampling_while(_recomputes)
    configure_loaded_compiler()


def _install_late(late: Callable[[Any], tuple[Patch, ...]], module: Any) -> None:
    for patch in late(module):
        patch.install()


# -- recomputation -----------------------------------------------------------------------------------------------------


def _frame_that_replays(init: Call) -> Call:
    return replayable_constructor(init, random.get_rng_state, random.replay)


def _forward_that_replays(plain: Call) -> Call:
    @wraps(plain)
    def forward(ctx: Any, run_function: Call, *args: Any) -> Any:
        return plain(ctx, replayable(run_function, random.get_rng_state, random.replay), *args)

    return forward


def _keeping_dtensors(apply: Call) -> Call:
    """If a DTensor is among the inputs, keep the inputs themselves, as later versions do."""

    @wraps(apply)
    def save(cls: Any, dummy: Any, kwargs: Any, *args: Any) -> Any:
        if not any(isinstance(arg, TorchDTensor) for arg in args):
            return apply(cls, dummy, kwargs, *args)
        saver = apply(cls, dummy, kwargs)
        if saver.grad_fn is not None:
            saver.grad_fn.get_args = lambda _saved: [kwargs, *args]
        return saver

    return save


def _recomputes() -> bool:
    """True where backward records operations: it repeats a forward by a mechanism that is not patched here."""
    return current_graph_task_id() >= 0 and torch.is_grad_enabled()


_OTHER_GENERATOR = (
    "recomputation restores the state of PyTorch's generators, but DTensors sample from a generator of their own"
)


# -- gradients ---------------------------------------------------------------------------------------------------------


def _converting_once(plain: Call) -> Call:
    @wraps(plain)
    def of_dtensor(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **options: Any) -> Any:
        # A mode must receive the call, and for a mapping a mapping is returned: PyTorch handles both.
        if type(outputs) is TorchDTensor and type(inputs) in _LEAVES and not args and not function_mode_enabled():
            return grad(outputs, inputs, grad_outputs, **options)
        return plain(outputs, inputs, grad_outputs, *args, **options)

    return of_dtensor


_LEAVES = frozenset({TorchDTensor, list, tuple})


def _abandoning_what_raises(run: Call) -> Call:
    @wraps(run)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            abandon_failed_backward()
            refuse_second_derivative(error)
            raise

    return run_backward


# -- the list ----------------------------------------------------------------------------------------------------------


_OUR_PARAMETERS = "it would take a DTensor for a plain tensor, and gather or average the wrong elements"
_PLAIN_VALUES = "it takes a DTensor for a plain tensor: complete state dicts would have shards"
_FSDP = "torch.distributed.fsdp"
LATE_PATCHES: dict[str, Callable[[Any], tuple[Patch, ...]]] = {
    f"{_FSDP}._fully_shard._fsdp_init": lambda module: (
        Patch(((module, "_verify_managed_param"),), managed_without_dtensors, _OUR_PARAMETERS),
    ),
    f"{_FSDP}._fully_shard._fully_shard": lambda module: tuple(
        Patch(((module, name),), with_their_mesh, "PyTorch's DTensors are on PyTorch's meshes only")
        for name in mesh_readers(module)
    ),
    f"{_FSDP}.fully_sharded_data_parallel": lambda module: (
        Patch(((module.FullyShardedDataParallel, "__init__"),), constructor_without_dtensors, _OUR_PARAMETERS),
    ),
    "torch.nn.utils.prune": lambda module: (
        Patch(
            ((module.BasePruningMethod, "apply"),),
            masks_of_whole_tensors,
            "it writes into flat views of masks, which are copies if a mask is sharded, and each rank draws alone",
        ),
    ),
    "torch.distributed._state_dict_utils": lambda module: tuple(
        Patch(((module, name),), replace, _PLAIN_VALUES, references=True)
        for name, replace in (
            ("_gather_state_dict", gathering_dtensors),
            ("_distribute_state_dict", distributing_to_shards),
            ("_broadcast_state_dict", broadcasting_to_shards),
            ("_broadcast_tensors", broadcasting_to_shards),
            ("_iterate_state_dict", going_into_dtensors),
        )
    ),
    "torch.distributed.checkpoint._state_dict_stager": lambda module: (
        Patch(
            ((module.StateDictStager, "_offload_tensor"),), staging_dtensors, "it copies storage, which a DTensor lacks"
        ),
    ),
    "torch.distributed.pipelining.stage": lambda module: (
        Patch(
            ((vars(module)["_PipelineStageBase"], "_get_init_p2p_neighbors_ops"),),
            received_apart,
            "it receives from both neighbors into one tensor at once, which this library refuses",
        ),
    ),
    "torch.distributed.tensor.debug._comm_mode": lambda module: tuple(
        Patch(
            ((vars(module)["_CommModeModuleTracker"], name),), replace, "it follows the modules of all simulated ranks"
        )
        for name, replace in (
            ("__enter__", entered_by_rank),
            *(
                (hook, of_entering_rank)
                for hook in ("_fw_pre_hook", "_fw_set_module_hook", "_fw_post_hook", "_bw_hook")
            ),
        )
    ),
    "torch._dynamo": lambda module: (
        Patch(
            ((module, "reset"),),
            reset_keeping_settings,
            "it forgets that simulated ranks may not share compiled code",
            references=True,
        ),
    ),
}
"""Patches by the module that they change, which the program imports: importing it here would take too long."""


# Each module of torch.optim has a function with its own name; the one of adamw calls the one of adam.
_STEPS = ("adadelta", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")


def _step_places(name: str) -> tuple[tuple[Any, str], ...]:
    modules = [name, "adamw"] if name == "adam" else [name]
    return tuple((sys.modules[f"torch.optim.{module}"], name) for module in modules)


PATCHES: tuple[Patch, ...] = (
    *(
        Patch(
            ((inputs, "apply"),),
            _keeping_dtensors,
            "it saves the inputs of a recomputed forward as tensors of the graph, which are local: the forward "
            "would run again on shards, with different random numbers",
            versions=("2.10",),
        )
        for inputs in [CheckpointInputs]
        if inputs is not None
    ),
    *(
        Patch(
            ((torch.autograd, name),),
            dispatched_backward,
            "it does not call __torch_function__, and a DTensor's own storage has no graph",
            versions=("2.10", "2.11"),
        )
        for name in not_dispatched()
    ),
    Patch(((DistributedDataParallel, "__init__"),), constructor_without_dtensors, _OUR_PARAMETERS),
    *(
        Patch(
            ((functional_collectives, name),),
            group_of_mesh,
            "functional collectives know only PyTorch's own mesh",
        )
        for name in group_resolvers()
    ),
    Patch(
        ((distributed_c10d, "_new_group_with_tag"),),
        built_within_the_limit,
        "a request to the store of a world whose link is cut waits for ever, whatever the time limit",
        references=True,
    ),
    Patch(
        ((torch.autograd.Function, "apply"),),
        lambda _: apply_function,
        "apply does not call __torch_function__: it would take a DTensor for a tensor without gradient, and drop the "
        "gradient silently",
    ),
    Patch(
        ((torch.autograd, "grad"),),
        _converting_once,
        "it asks each output and input for __torch_function__, and then does the same for the local tensors",
        references=True,
    ),
    Patch(
        ((torch.autograd, "_engine_run_backward"), (torch.autograd.graph, "_engine_run_backward")),
        _abandoning_what_raises,
        "its callbacks are not called where a backward raises: modules of fully_shard would keep the gathered "
        "parameters, and reductions in flight would be added to the gradients of the next backward; and a second "
        "derivative through the first call of a compiled module ends in a message about torch.compile",
    ),
    Patch(
        ((torch.autograd.graph, "_get_grad_fn_or_grad_acc"),),
        node_of,
        "register_multi_grad_hook asks whether the engine will run a node, and the node of a DTensor is a local one",
    ),
    Patch(
        ((torch.autograd.graph, "get_gradient_edge"),),
        edge_of,
        "it returns a node of the graph of local tensors, whose gradients and hooks are local",
        references=True,
    ),
    Patch(
        ((BackwardHook, "_apply_on_tensors"),),
        hooks_with_dtensors,
        "it hooks into the graph of the local tensors: hooks of modules would see the gradients of shards",
    ),
    Patch(
        ((Module, "_maybe_warn_non_full_backward_hook"),),
        refuse_old_hooks,
        "it runs before hooks that would see the gradients of the last operation, which computes on shards",
    ),
    Patch(
        ((torch.nn.utils, "vector_to_parameters"), (convert_parameters, "vector_to_parameters")),
        vector_into_dtensors,
        "it makes each parameter a view of the vector, but other ranks need the elements as well",
        references=True,
    ),
    Patch(
        ((torch.nn.utils, "clip_grad_norm_"), (clip_grad, "clip_grad_norm_")),
        clipped_on_all_meshes,
        "it stacks the norms of all gradients, which may be on several meshes",
        references=True,
    ),
    Patch(
        ((torch.nn.utils, "get_total_norm"), (clip_grad, "_get_total_norm")),
        norm_on_all_meshes,
        "it stacks the norms of all tensors, which may be on several meshes",
        references=True,
    ),
    Patch(
        ((parametrize, "_maybe_set"),),
        set_in_own_layout,
        "the parameter takes the storage of what right_inverse returns, which may have a different layout",
    ),
    *(
        Patch(
            ((Orthogonal, name),),
            on_whole_tensors,
            "it needs complete matrices, and mixes them with constants and random numbers of its own",
        )
        for name in ("forward", "right_inverse")
    ),
    *(
        Patch(
            ((kind, "rsample"),),
            draws_alike,
            "it draws plain numbers, different ones on each rank, and combines them with the distribution's parameters",
        )
        for kind in DISTRIBUTIONS
    ),
    Patch(((CheckpointFrame, "__init__"),), _frame_that_replays, _OTHER_GENERATOR),
    Patch(((checkpoint.CheckpointFunction, "forward"),), _forward_that_replays, _OTHER_GENERATOR),
    *(
        Patch(
            ((torch.masked, name), (masked_functions, name)),
            with_storage_format,
            "it does not call __torch_function__, and compares x.layout, a DTensor's layout, with torch.strided",
            references=True,
        )
        for name in functions_of_masked()
    ),
    *(
        Patch(
            ((TensorLikePair, name),),
            pair_with_storage_format,
            "torch.testing.assert_close compares x.layout, a DTensor's layout, with torch.strided",
        )
        for name in ("__init__", "compare")
    ),
    *(
        Patch(
            _step_places(name),
            on_local_tensors,
            "it calls some twenty operators on lists of parameters or on each parameter, and on DTensors each call "
            "reads every layout again: twice the time of a step on local tensors",
        )
        for name in _STEPS
    ),
    *(
        Patch(
            places,
            sparse_on_local_tensors,
            "it reads indices and values of sparse gradients, which are only those of this rank's rows",
        )
        for places in (((optim_functional, "sparse_adam"),), _step_places("adagrad"))
    ),
    Patch(
        ((torch, "compile"),),
        compile_around_dtensors,
        "it traces every Python function, and would trace hooks and dispatch of this package in place of running them; "
        "simulated ranks would share what it compiled, with the rank as a constant",
        references=True,
    ),
)
