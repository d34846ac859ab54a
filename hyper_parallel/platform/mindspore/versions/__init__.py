"""MindSpore's private names, each once, with the places where different versions have it.

``from hyper_parallel.platform.mindspore.versions import name`` looks up the name in the installed version: the graph
compiler moved from ``mindspore.common`` to ``mindspore.graph`` in 2.9. Attributes that are replaced are in
``patches.py``.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel._versions import Names, Wanted
from hyper_parallel.platform.tested import TESTED

__all__ = ["NAMES", "TENSOR_GRADIENTS"]

TENSOR_GRADIENTS = ("_grad", "_grad_node", "_is_leaf", "_requires_grad", "requires_grad_")
"""Attributes of tensors that ``backward()`` reads and writes."""

_GUARD = "the refusal of DTensors in compiled code"
_GRADIENTS = "gradients of DTensors"
_IMPERATIVE = "backward() on MindSpore"
_RECOMPUTED = "recomputation that draws from DTensors"
_WORLD = "MindSpore's collectives on simulated ranks"
_SCALING = "loss scaling of DTensors"


def _name(path: str, feature: str, versions: str = "") -> Wanted:
    return Wanted((path,), feature, versions)


def _of_api(name: str, feature: str) -> Wanted:
    return Wanted((f"mindspore.graph.api.{name}", f"mindspore.common.api.{name}"), feature)


NAMES = Names(
    "MindSpore",
    "mindspore",
    {
        # differentiation
        "CellBackwardHook": _name("mindspore.ops.operations._inner_ops.CellBackwardHook", "hooks of Cells on DTensors"),
        "Function": _name("mindspore.common._grad_function._Function", _GRADIENTS),
        "Grad": _name("mindspore.ops.composite.base._Grad", _GRADIENTS),
        "PyNativeExecutor": _of_api("_PyNativeExecutor", _GRADIENTS),
        **{name: _name(f"mindspore.Tensor.{name}", _IMPERATIVE) for name in TENSOR_GRADIENTS},
        "RecomputeCell": _name("mindspore.common.recompute._RecomputeCell", _RECOMPUTED),
        "RecomputeHandle": Wanted(
            ("mindspore.common.recompute._RecomputeHandle", "mindspore.common.recompute._RecomputeState"), _RECOMPUTED
        ),
        "get_bprop_fn": _name("mindspore.ops._grad_experimental.grad_base.get_bprop_fn", _WORLD),
        "grad_comm_ops": _name("mindspore.ops._grad_experimental.grad_comm_ops", _WORLD),
        "run_backward": _name("mindspore._c_expression.run_backward", _IMPERATIVE),
        "no_grad": _of_api("_no_grad", _GRADIENTS),
        "pynative_executor": _of_api("_pynative_executor", _GRADIENTS),
        # dispatch
        "MixedPrecisionType": _name("mindspore._c_expression.MixedPrecisionType", "mixed precision of DTensors"),
        "MsDispatchMode": _name("mindspore.utils.MsDispatchMode", "selective checkpointing", "2.9 and newer"),
        "NoFallbackGuard": _name("mindspore._c_expression.NoFallbackGuard", "DTensors"),
        "TensorOverloadCall": _name("mindspore._c_expression.TensorOverloadCall", "methods of DTensors"),
        "cell_base": _name("mindspore._c_expression.Cell_", "offloaded modules"),
        "make_subclass": _name("mindspore.Tensor._make_subclass", "DTensors"),
        "op_enum": _name("mindspore._c_expression.op_enum", "Fourier transforms of DTensors"),
        "DeviceCtx": _name("mindspore.DeviceCtx", "tensors on the meta device", "2.9 and newer"),
        # the graph compiler
        "jit_context": Wanted(
            ("mindspore.graph.jit_context.jit_context", "mindspore.common.jit_context.jit_context"), _GUARD
        ),
        "CellGraphExecutor": _of_api("_CellGraphExecutor", _GUARD),
        "JitExecutor": _of_api("_JitExecutor", _GUARD),
        "PIJitCaptureContext": Wanted(
            (
                "mindspore.graph._utils.pijit_context.PIJitCaptureContext",
                "mindspore.common._pijit_context.PIJitCaptureContext",
            ),
            _GUARD,
        ),
        "get_mode": _name("mindspore.context._get_mode", "graph mode"),
        "parse": Wanted(("mindspore.graph._parse", "mindspore._extends.parse"), _WORLD),
        "process_context": _name("mindspore.context._context", "graph mode"),
        # functions of nn and amp
        "ClipByGlobalNorm": _name("mindspore.ops.function.clip_func._ClipByGlobalNorm", "recorded clip factors"),
        "RecurrentLayer": _name("mindspore.nn.layer.rnns._RNNBase", "recurrent layers on DTensors"),
        "all_finite": _name("mindspore.amp._all_finite", _SCALING),
        "fans": _name("mindspore.common.initializer._calculate_fan_in_and_fan_out", "delayed initialization"),
        "calculated_gain": _name("mindspore.common.initializer._calculate_gain", "delayed initialization"),
        "grad_scale_map": _name("mindspore.amp._grad_scale_map", _SCALING),
        "grad_unscale_map": _name("mindspore.amp._grad_unscale_map", _SCALING),
        "update_param": _name("mindspore.train.serialization._update_param", "loading checkpoints into DTensors"),
        # communication
        "ExistingGroup": _name("mindspore.communication._comm_helper._ExistingGroup", _WORLD),
        "MSContext": _name("mindspore._c_expression.MSContext", "settings of the device"),
        "SyncBatchNorm": _name("mindspore.ops.operations._inner_ops.SyncBatchNorm", _WORLD),
        "comm_helper": _name("mindspore.communication._comm_helper", _WORLD),
        "ms_ctx_param": _name("mindspore._c_expression.ms_ctx_param", "settings of the device"),
        "primitive_cache": _name("mindspore.ops._primitive_cache._PRIM_CACHE", _WORLD),
    },
    TESTED["mindspore"],
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return NAMES.find(name)
