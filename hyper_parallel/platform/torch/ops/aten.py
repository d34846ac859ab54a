"""Operator overloads without a Python function of the same name, reached by functions without a rule."""

from __future__ import annotations

from hyper_parallel.platform.torch.ops.registry import aten, spelling

spelling("clamp", aten.clamp_min.default, aten.clamp_min.Tensor, signature="x, min")
spelling("clamp", aten.clamp_max.default, aten.clamp_max.Tensor, signature="x, max")
spelling("clamp", aten.clamp_min_.default, aten.clamp_min_.Tensor, signature="x, min")
spelling("clamp", aten.clamp_max_.default, aten.clamp_max_.Tensor, signature="x, max")
spelling("prelu", aten._prelu_kernel.default)
# With these torch.distributions checks its parameters and samples.
spelling("all", "_is_all_true", aten._is_all_true.default, signature="x")
spelling("any", "_is_any_true", aten._is_any_true.default, signature="x")
