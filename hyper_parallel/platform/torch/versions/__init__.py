"""PyTorch's private names, and the differences between its versions, each once; transports import this module, too.

``from hyper_parallel.platform.torch.versions import name`` looks up the name in the installed version. Attributes that
are replaced are in ``patches.py``, with the versions that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch.autograd import forward_ad

from hyper_parallel._versions import Names, Wanted
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.tested import TESTED

__all__ = [
    "NAMES",
    "call_compile",
    "creating_groups",
    "function_apply",
    "global_module_hooks",
    "group_resolvers",
    "inside_forward_ad",
    "is_view",
    "mesh_readers",
    "native_apply",
    "not_dispatched",
    "overload_call",
    "register_group",
    "release_saved",
    "schema_arguments",
    "stand_in",
    "storage_number",
]

_COMPILE = "torch.compile with DTensors"
_REGIONS = "hyper_parallel.compile"
_ISOLATION = "torch._C._dynamo.eval_frame.{}_eval_frame_isolate_recompiles_id"
_C10D = "torch.distributed.distributed_c10d"
_THREADS = "a simulated world of threads"
_GROUPS = "process groups of simulated ranks"
_FUNC = "torch.func on DTensors"
_NESTED = "nested arguments with DTensors"
_HOOKS = "hooks of modules on DTensors"
_BACKWARD = "fully_shard and replicate"
_DECOMPOSED = "operators as graphs of others"
_PRETENDED = "the CPU instead of a device"
_SAMPLES = "which samples data loaders draw"
_RECEIVES = "checks of receives that are pending"
_ROUNDING = "float32 products that are exact on every device"


def _name(path: str, feature: str, versions: str = "", **otherwise: Any) -> Wanted:
    return Wanted((path,), feature, versions, **otherwise)


NAMES = Names(
    "PyTorch",
    "torch",
    {
        # autograd
        "BackwardHookFunction": _name("torch.nn.modules._functions.BackwardHookFunction", _HOOKS),
        "current_graph_task_id": _name("torch._C._current_graph_task_id", _BACKWARD),
        "execution_engine": _name("torch.autograd.Variable._execution_engine", _BACKWARD),
        "force_original_view_tracking": _name(
            "torch.autograd.grad_mode._force_original_view_tracking", "views of DTensors"
        ),
        "FunctionBase": _name("torch._C._FunctionBase", "custom autograd functions on DTensors"),
        "set_version_counter": _name("torch._C._autograd._unsafe_set_version_counter", "fully_shard"),
        "top_saved_tensors_hooks": _name(
            "torch._C._autograd._top_saved_tensors_default_hooks", "saved_tensors_hooks inside others"
        ),
        "will_engine_execute_node": _name("torch._C._will_engine_execute_node", "hooks on gradients of DTensors"),
        # dispatch
        "DisableTorchFunction": _name("torch._C.DisableTorchFunction", "prove plan"),
        "DisableTorchFunctionSubclass": _name("torch._C.DisableTorchFunctionSubclass", "DTensors"),
        "DispatchKey": _name("torch._C.DispatchKey", "checks of collectives before they run"),
        "OpOverload": _name("torch._ops.OpOverload", "operator overloads on DTensors"),
        "dispatch_mode_stack": _name("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "CommDebugMode"),
        "pop_dispatch_mode": _name("torch.utils._python_dispatch._pop_mode", _RECEIVES),
        "push_dispatch_mode": _name("torch.utils._python_dispatch._push_mode", _RECEIVES),
        "TorchDispatchMode": _name("torch.utils._python_dispatch.TorchDispatchMode", _RECEIVES),
        "function_mode_enabled": _name("torch._C._is_torch_function_mode_enabled", "torch.autograd.grad on DTensors"),
        "functional": _name("torch._C._nn", "operators on DTensors"),
        "is_functorch_wrapped_tensor": _name("torch._C._functorch.is_functorch_wrapped_tensor", _FUNC),
        "len_dispatch_stack": _name("torch._C._len_torch_dispatch_stack", "dispatch modes on DTensors"),
        "make_wrapper": _name("torch.Tensor._dtensor__new__", "DTensors"),
        "peek_interpreter_stack": _name("torch._C._functorch.peek_interpreter_stack", _FUNC),
        "pytree": _name("torch.utils._pytree", _NESTED),
        "tree_leaves": _name("torch.utils._pytree.tree_leaves", _NESTED),
        "tree_map": _name("torch.utils._pytree.tree_map", _NESTED),
        "storage_use_count": _name("torch._C._storage_Use_Count", "views of a storage that DTensors share"),
        "transforms_active": _name("torch._C._are_functorch_transforms_active", _FUNC),
        # operators
        "amp_unscale": _name("torch._amp_foreach_non_finite_check_and_unscale_", "torch.amp.GradScaler"),
        "assert_async": _name("torch._assert_async", "checks of classes on a device"),
        # operators as primitives
        "ConstantSource": _name("torch._dynamo.source.ConstantSource", _DECOMPOSED),
        "ensure_device_guard": _name("torch._C._ensureCUDADeviceGuardSet", "", "2.10 and 2.11", otherwise=lambda: None),
        "FakeTensorMode": _name("torch._subclasses.fake_tensor.FakeTensorMode", _DECOMPOSED),
        "FunctionalTensorMode": _name("torch._subclasses.functional_tensor.FunctionalTensorMode", _DECOMPOSED),
        "broadcasting": _name("torch._subclasses.fake_impls", _DECOMPOSED),
        "layouts": _name("torch._prims_common", _DECOMPOSED),
        "node_metadata": _name("torch.fx.passes.shape_prop", _DECOMPOSED),
        "view_layouts": _name("torch._refs", _DECOMPOSED),
        "trilinear": _name("torch.ops.aten._trilinear", _DECOMPOSED),
        "decompositions": _name("torch._decomp.decomposition_table", _DECOMPOSED),
        "dispatch_functionalize": _name("torch._subclasses.functional_tensor.dispatch_functionalize", _DECOMPOSED),
        "enable_python_dispatcher": _name("torch._dispatch.python.enable_python_dispatcher", _DECOMPOSED),
        # compiler: looked up when a program first compiles
        "TracingContext": _name("torch._guards.TracingContext", _COMPILE),
        "Unsupported": _name("torch._dynamo.exc.Unsupported", _COMPILE),
        "UserFunctionVariable": _name("torch._dynamo.variables.functions.UserFunctionVariable", _COMPILE),
        "callback_handler": _name("torch._dynamo.callback.callback_handler", _COMPILE),
        "trace_rules": _name("torch._dynamo.trace_rules", _COMPILE),
        "aot_function": _name("torch._functorch.aot_autograd.aot_function", _REGIONS),
        "make_boxed_func": _name("torch._functorch.aot_autograd.make_boxed_func", _REGIONS),
        "compile_fx_inner": _name("torch._inductor.compile_fx.compile_fx_inner", _REGIONS),
        "inductor_config": _name("torch._inductor.config", _REGIONS),
        "select_decomp_table": _name("torch._inductor.decomposition.select_decomp_table", _REGIONS),
        "module_functions": _name("torch.nn.modules.module", _REGIONS),
        "get_isolation": _name(_ISOLATION.format("get"), "", "2.13 and newer", otherwise=lambda: -1),
        "set_isolation": _name(_ISOLATION.format("set"), "", "2.13 and newer", otherwise=lambda _: None),
        # what is replaced: see patches.py
        "CheckpointFrame": _name("torch.utils.checkpoint._CheckpointFrame", "recomputation that draws from DTensors"),
        "CheckpointInputs": _name("torch.utils.checkpoint._NoopSaveInputs", "", "2.11 and older", otherwise=None),
        "Orthogonal": _name("torch.nn.utils.parametrizations._Orthogonal", "parametrizations.orthogonal on DTensors"),
        "WrappedHook": _name("torch.nn.modules.module._WrappedHook", _HOOKS),
        "TensorLikePair": _name("torch.testing._comparison.TensorLikePair", "torch.testing.assert_close on DTensors"),
        "functional_collectives": _name("torch.distributed._functional_collectives", "functional collectives"),
        "masked_functions": _name("torch.masked._ops", "torch.masked on DTensors"),
        "optim_functional": _name("torch.optim._functional", "SparseAdam on DTensors"),
        # torch.distributed
        "StridedShard": _name(
            "torch.distributed.tensor.placement_types._StridedShard", "StridedShard to and from PyTorch's DTensor"
        ),
        "backend_plugins": _name("torch.distributed.Backend._plugins", "backends of other packages"),
        "allgather_base": _name("torch.ops.c10d._allgather_base_", "CommDebugMode"),
        "c10d_world": _name(f"{_C10D}._world", _GROUPS),
        "create_group": _name(f"{_C10D}._new_process_group_helper", "real processes"),
        "default_store": _name(f"{_C10D}._get_default_store", "real processes"),
        "find_group": _name(f"{_C10D}._find_pg_by_ranks_and_tag", _GROUPS),
        "new_group_with_tag": _name(f"{_C10D}._new_group_with_tag", _GROUPS),
        "reduce_scatter_base": _name("torch.ops.c10d._reduce_scatter_base_", "CommDebugMode"),
        "register_in_world": Wanted(
            (f"{_C10D}._register_pg_in_world", f"{_C10D}._update_process_group_global_state"), _GROUPS
        ),
        "resolve_process_group": _name(f"{_C10D}._resolve_process_group", "functional collectives"),
        "unregister_groups": _name(f"{_C10D}._unregister_all_process_groups", _GROUPS),
        "set_thread_isolation": _name("torch._C._distributed_c10d._set_thread_isolation_mode", _THREADS),
        "symmetric_memory": _name("torch.distributed._symmetric_memory", "symmetric memory"),
        # the CPU instead of a device
        "context_parallel": Wanted(
            (
                "torch.distributed.tensor.experimental._context_parallel._attention",
                "torch.distributed.tensor.experimental._attention",
            ),
            _PRETENDED,
        ),
        "flash_attention": _name("torch.ops.aten._scaled_dot_product_flash_attention.default", _PRETENDED),
        "flash_attention_on_cpu": _name(
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default", _PRETENDED
        ),
        "flash_attention_on_cpu_backward": _name(
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default", _PRETENDED
        ),
        "op_dispatcher": _name("torch.distributed.tensor.DTensor._op_dispatcher", _PRETENDED),
        "device_constructors": _name("torch.utils._device._device_constructors", _PRETENDED),
        "device_context": _name("torch.utils._device.DeviceContext", _PRETENDED),
        "function_table": _name("torch.jit._builtins", _PRETENDED),
        "loader_iterator": _name("torch.utils.data.dataloader._BaseDataLoaderIter", _SAMPLES),
        "register_device_module": _name("torch._register_device_module", _PRETENDED),
        # switches
        "get_precision": _name("torch._C._get_fp32_precision_getter", _ROUNDING),
        "set_cudnn_tf32": _name("torch._C._set_cudnn_allow_tf32", _ROUNDING),
        "set_precision": _name("torch._C._set_fp32_precision_setter", _ROUNDING),
    },
    TESTED["torch"],
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return NAMES.find(name)


def inside_forward_ad() -> bool:
    """Whether a ``torch.autograd.forward_ad.dual_level`` is open, as inside ``torch.func.jvp``."""
    level: int = forward_ad._current_level  # noqa: SLF001 - no public spelling
    return level >= 0


def function_apply() -> Any:
    """Return ``torch.autograd.Function.apply`` as a function of the class; it is native from 2.14 on."""
    apply = vars(torch.autograd.Function)["apply"]
    return getattr(apply, "__func__", apply)


def native_apply() -> Any:
    """Return the native half of ``torch.autograd.Function.apply``, unbound."""
    base = NAMES.find("FunctionBase")
    return vars(base).get("apply", base)


def global_module_hooks() -> tuple[Any, ...]:
    """Return the dictionaries of hooks that every module calls."""
    functions = NAMES.find("module_functions")
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return tuple(getattr(functions, f"_global_{kind}") for kind in kinds)


def overload_call(overload: Any) -> Any:
    """Return the function that an operator overload's own ``__call__`` calls."""
    return getattr(overload, "_op", overload)


def is_view(tensor: Any) -> bool:
    """Return whether autograd follows ``tensor`` as a view."""
    return tensor._is_view()  # noqa: SLF001 - no public spelling


def storage_number(tensor: Any) -> int:
    """Return a number of the storage of ``tensor``; storages without values have no address."""
    number: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - no public spelling
    return number


def schema_arguments(overload: Any) -> list[Any]:
    """Return the arguments of an operator overload, with their names and whether they are written."""
    return list(overload._schema.arguments)  # noqa: SLF001 - no public spelling


def stand_in(replacement: Any, plain: Any) -> None:
    """Make TorchScript treat ``replacement`` as the operator that ``plain`` represents, if there is one."""
    table = NAMES.find("function_table")
    operator = table._find_builtin(plain)  # noqa: SLF001 - no public spelling
    if operator:  # PyTorch itself compiles its optimizers when they are imported
        table._register_builtin(replacement, operator)  # noqa: SLF001 - as above


def release_saved(node: Any) -> None:
    """Let a node of autograd forget what it saved, unless the graph is retained."""
    node.maybe_clear_saved_tensors()


def not_dispatched() -> tuple[str, ...]:
    """Return the names of functions of ``torch.autograd`` that do not call ``__torch_function__``: one before 2.12."""
    return tuple(
        name for name in ("backward",) if "has_torch_function" not in getattr(torch.autograd, name).__code__.co_names
    )


def group_resolvers() -> tuple[str, ...]:
    """Return the names of the functions with which functional collectives read a group; one is renamed in 2.12."""
    new = hasattr(NAMES.find("functional_collectives"), "_resolve_group")
    return ("_resolve_group" if new else "_resolve_group_name", "_expand_group")


@contextmanager
def creating_groups(call: Callable[[Any], None]) -> Iterator[None]:
    """Call ``call`` with what PyTorch returns for each process group that is created inside."""
    from torch.distributed import distributed_c10d  # a build without it has no processes

    module, name = distributed_c10d, NAMES.find("create_group").__name__
    plain = getattr(module, name)

    def create(*args: Any, **kwargs: Any) -> Any:
        created = plain(*args, **kwargs)
        call(created)
        return created

    setattr(module, name, create)
    try:
        yield
    finally:
        setattr(module, name, plain)


def register_group(group: Any, tag: str | None, **facts: Any) -> None:
    """Enter a group into PyTorch's tables, under ``tag`` or, without one, also under the default."""
    register = NAMES.find("register_in_world")
    if tag:
        register(group, pg_tag=f"user:{tag}", **facts)
    elif "add_to_default_tag" in signature(register).parameters:
        register(group, add_to_default_tag=True, **facts)
    else:  # before 2.13 the callers of register did that
        NAMES.find("c10d_world").tags_to_pg.setdefault("", []).append(group)
        register(group, **facts)


def mesh_readers(module: Any) -> tuple[str, ...]:
    """Return the names of functions with which PyTorch's ``fully_shard`` reads the mesh; one function from 2.11 on."""
    return ("_get_mesh_info",) if hasattr(module, "_get_mesh_info") else ("FSDPMeshInfo", "HSDPMeshInfo")


def call_compile(compile_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, simulated: bool) -> Any:
    """Call ``torch.compile``; each simulated rank gets its own compiled code.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) simulated ranks would share compiled code; only 2.13 and newer can
            separate it.
    """
    if not simulated:
        return compile_(*args, **kwargs)
    if "isolate_recompiles" not in signature(compile_).parameters:
        msg = (
            "torch.compile on simulated ranks needs its argument isolate_recompiles, which PyTorch "
            f"{torch.__version__} does not have; PyTorch 2.13 and newer has it: run the program on real processes, or "
            "without torch.compile"
        )
        raise UnsupportedOnBackend(msg)
    return compile_(*args, **{**kwargs, "isolate_recompiles": True})


if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
    # If a build for CUDA finds no driver, the first fake tensor mode sets a guard. If that happens in a thread that
    # ends, such as a rank, the next mode can cause a segmentation fault. The thread that imports this does not end.
    NAMES.find("ensure_device_guard")()
