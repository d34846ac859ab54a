"""What MindSpore's operators are given and has no rule is refused in words, and never ignored."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.errors import LayoutError, MeshError, UnsupportedOnBackend, UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named, use_platform

pytestmark = pytest.mark.platforms("mindspore")

WAY_OUT = "redistribute the operands and use to_local()"


def _attention(x, **options):
    from mindspore import ops

    return ops.flash_attention_score(x, x, x, options.pop("heads", 2), **{"input_layout": "BNSD", **options})


def _calls(make):
    """Message -> call."""
    from mindspore import mint, ops

    x, q = make((2, 3)), make((1, 2, 3, 4))
    lattice, image = make((1, 1, 4, 4, 4)), make((1, 1, 4, 4))
    flash = "operator FlashAttentionScore"
    return {
        "operator ops.bernoulli: a tensor as p has no sharding rule; pass a number, or use mint.bernoulli": lambda: (
            ops.bernoulli(x, x)
        ),
        "operator ops.max: where= has no sharding rule; use masked_fill first": lambda: ops.max(x, where=x > 0),
        f"operator ops.min: initial=1.0 has no sharding rule, initial=None has; {WAY_OUT}": lambda: ops.min(
            x, initial=1.0
        ),
        f"operator ops.clip_by_global_norm: use_norm=2.0 has no sharding rule, use_norm=None has; {WAY_OUT}": lambda: (
            ops.clip_by_global_norm([x], 1.0, 2.0)
        ),
        "operator einsum: every operand must be a DTensor, and the equation comes first": lambda: mint.einsum(
            "ij,kj->ik", x, x.to_local()
        ),
        f"{flash}: padding_mask='a tensor' has no sharding rule, padding_mask=None has; {WAY_OUT}": lambda: _attention(
            q, padding_mask=q
        ),
        f"{flash}: sparse_mode=4 has no sharding rule, sparse_mode=0 has; {WAY_OUT}": lambda: _attention(
            q, sparse_mode=4
        ),
        f"{flash}: real_shift='a tensor' has no sharding rule, real_shift=None has; {WAY_OUT}": lambda: _attention(
            q, sparse_mode=2, real_shift=q
        ),
        f"{flash}: head_num=3 has no sharding rule, head_num=2 has; {WAY_OUT}": lambda: _attention(q, heads=3),
        f"operator PromptFlashAttention: pre_tokens=3 has no sharding rule, pre_tokens=2147483647 has; {WAY_OUT}": (
            lambda: ops.prompt_flash_attention(q, q, q, num_heads=2, input_layout="BNSD", pre_tokens=3)
        ),
        f"operator AvgPool3D: pad_mode='same' has no sharding rule, pad_mode='valid' has; {WAY_OUT}": lambda: (
            ops.AvgPool3D(2, 2, "same")(lattice)
        ),
        f"operator MaxPool: pad_mode='same' has no sharding rule, pad_mode='valid' has; {WAY_OUT}": lambda: ops.MaxPool(
            2, 2, "same"
        )(image),
        "operator nothing is not implemented on MindSpore; write it with others, or use PyTorch": lambda: (
            platform_named("mindspore").local_op("nothing")
        ),
    }


def test_options_without_a_rule_are_refused():
    """Each message says which option has no rule, which value has one, and the way out."""
    with use_platform("mindspore"):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("m",))
        ones = lambda shape: platform_named("mindspore").from_numpy(np.ones(shape, np.float32))  # noqa: E731 - short
        for message, call in _calls(lambda shape: DTensor.from_local(ones(shape), mesh, [Replicate()])).items():
            with pytest.raises(UnsupportedOperatorError) as caught:
                call()
            assert str(caught.value) == message


def test_weights_that_fit_no_channel_are_refused():
    """As many weights as channels, or one: others would broadcast to another shape."""
    from mindspore import ops

    with use_platform("mindspore"):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("m",))
        ones = lambda shape: platform_named("mindspore").from_numpy(np.ones(shape, np.float32))  # noqa: E731 - short
        x, weight = (DTensor.from_local(ones(shape), mesh, [Replicate()]) for shape in ((2, 1, 4), (3,)))
        with pytest.raises(LayoutError) as caught:
            ops.prelu(x, weight)
    assert str(caught.value) == "operator PReLU: 3 weights for [2, 1, 4], which has 1 channels; give one, or so many"


def test_what_the_rehearsal_does_not_take_is_refused(monkeypatch):
    """A world over gloo takes a rank, a size and an address; what only HCCL takes is named, and so is what lacks."""
    platform = platform_named("mindspore")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UnsupportedOnBackend, match=r"^MCCL, MindSpore's engine on CPU, is refused: it silently "):
        platform.init_process_group("mccl", rank=0, world_size=1)
    with pytest.raises(UnsupportedOnBackend, match=r"^backend 'nccl' is none of MindSpore's; there is 'hccl'$"):
        platform.init_process_group("nccl")
    with pytest.raises(UnsupportedOnBackend) as caught:
        platform.init_process_group("gloo", rank=0, world_size=1, store=object(), device_id=0)
    assert str(caught.value) == (
        "init_process_group: the CPU rehearsal over gloo takes no store, device_id; leave them out"
    )
    with pytest.raises(MeshError) as caught:
        platform.init_process_group("gloo", rank=0)
    assert str(caught.value) == (
        "init_process_group: world_size is not given, and no launcher set WORLD_SIZE; pass world_size="
    )


def test_what_only_another_framework_has_is_refused():
    """Benchmarks and conversions that need PyTorch's own DTensor say so."""
    platform = platform_named("mindspore")
    with pytest.raises(UnsupportedOnBackend) as caught:
        platform.benchmark(3)
    assert str(caught.value) == (
        "benchmark: mindspore has no distributed tensor of its own to compare with; measure on torch"
    )
    with pytest.raises(UnsupportedOnBackend) as caught:
        platform.from_torch(3)
    assert str(caught.value) == "from_torch: expected a torch.distributed.tensor.DTensor, got a int"
