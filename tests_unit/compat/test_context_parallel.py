"""Context-parallel styles: attention, its gradients and its kernels' settings are those of one device."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import init_device_mesh
from hyper_parallel.compat.context_parallel import AsyncContextParallel, ContextParallel
from hyper_parallel.errors import MeshError, PlanError
from hyper_parallel.platform.select import get_platform
from hyper_parallel.verify.simulate import simulate

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 12, 3


def array(*shape, seed=0):
    """Normal float32 values from a fresh generator."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def operands(key_heads):
    """Query, key and value of one device, and a cotangent of the result."""
    return [array(BATCH, n, LENGTH, WIDTH, seed=i) for i, n in enumerate((HEADS, key_heads, key_heads, HEADS))]


def attention(q, k, v, hidden):
    """Attention in NumPy, with grouped heads."""
    k, v = (np.repeat(each, q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = q @ k.swapaxes(-1, -2)
    scores = np.where(hidden, -np.inf, scores)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True) @ v


def gradients(q, k, v, cotangent, hidden):
    """Gradients of attention by hand."""
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (np.repeat(each, groups, 1) for each in (k, v))
    scores = np.where(hidden, -np.inf, q @ wide_k.swapaxes(-1, -2))
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares = shares / shares.sum(-1, keepdims=True)
    to_shares = cotangent @ wide_v.swapaxes(-1, -2)
    to_scores = shares * (to_shares - (to_shares * shares).sum(-1, keepdims=True))
    summed = lambda x: x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(2)  # noqa: E731
    return (
        to_scores @ wide_k,
        summed(to_scores.swapaxes(-1, -2) @ q),
        summed(shares.swapaxes(-1, -2) @ cotangent),
    )


LAYOUTS = {  # from [B, H, S, E]; dims of the sequence and of the heads
    "BNSD": (lambda x: x, 2, 1),
    "BSND": (lambda x: x.swapaxes(1, 2), 1, 2),
    "BSH": (lambda x: x.swapaxes(1, 2).reshape(BATCH, x.shape[2], -1), 1, 2),
}


def module_of(kernel=None):
    """A module that computes attention by matrix products, or has a kernel."""
    platform = get_platform()

    class Attention(platform.Module):
        def __init__(self):
            super().__init__()
            if kernel:
                self.kernel = kernel

        def compute(self, q, k, v, mask=0):
            if kernel:
                return self.kernel(q, k, v)
            groups = q.shape[1] // k.shape[1]
            k, v = (platform.repeat_interleave(each, groups, 1) if groups > 1 else each for each in (k, v))
            scores = q @ k.swapaxes(-1, -2)
            shares = (scores + mask).exp()
            return shares / shares.sum(-1, keepdim=True) @ v

        forward = construct = compute

    return Attention()


def by_kernel(degree, layout, mode, style, named):
    """The fused kernel under a style: results and gradients of this rank's part, twice."""
    import mindspore as ms
    from mindspore import Tensor, nn
    from mindspore.ops.operations.nn_ops import FlashAttentionScore

    from hyper_parallel.verify.frameworks.mindspore.pretended_npu import pretended_npu

    platform = get_platform()
    mesh = init_device_mesh("npu", (platform.get_world_size(),), mesh_dim_names=("cp",))
    move, seq, head = LAYOUTS[layout]
    size = LENGTH // mesh.size()
    key_heads = 2
    cut = slice(mesh.get_local_rank() * size, (mesh.get_local_rank() + 1) * size)
    *values, cotangent = (Tensor(np.ascontiguousarray(move(each[:, :, cut]))) for each in operands(key_heads))

    class Attention(nn.Cell):
        def __init__(self):
            super().__init__()
            self.kernel = FlashAttentionScore(HEADS, input_layout=layout, sparse_mode=mode)

        def construct(self, query, key, value):
            return self.kernel(query, key, value)[3]

    class Handoff(nn.Cell):
        def construct(self, x):
            return x

    module, handoffs = Attention(), [Handoff(), Handoff(), Handoff()]
    with pretended_npu():
        made = style(seq_dim=seq, head_dim=head, ulysses_degree=degree)
        if style is AsyncContextParallel:
            names = ("q_proj", "k_proj", "v_proj")
            assert made.apply(module, mesh, **dict(zip(names, handoffs, strict=True))) is module
        else:
            assert made.apply(module, mesh) is module

        def run(*x):
            q, k, v = (handoff(each) for handoff, each in zip(handoffs, x, strict=True))
            return module(q, value=v, key=k) if named else module(q, k, v)

        for _ in range(2):
            result = run(*values)
            found = ms.grad(lambda *x: (run(*x) * cotangent).sum(), (0, 1, 2))(*values)
    assert module.kernel.head_num == HEADS
    return [each.asnumpy() for each in (result, *found)]


@pytest.mark.platforms("mindspore")
@pytest.mark.parametrize(
    "ranks, degree, layout, mode, style, named",
    [
        (3, 1, "BSH", 2, ContextParallel, False),
        (4, 1, "BNSD", 3, ContextParallel, True),
        (2, 2, "BNSD", 2, ContextParallel, False),
        (4, 2, "BNSD", 2, ContextParallel, False),
        (4, 2, "BSND", 2, AsyncContextParallel, True),
        (2, 2, "BSND", 0, AsyncContextParallel, False),
        (4, 2, "BSND", 0, ContextParallel, False),
    ],
)
def test_attention_and_gradients_are_those_of_one_device(ranks, degree, layout, mode, style, named):
    """Gathered, exchanged and both, causal and not, in each layout: every rank has its part of one device's."""
    q, k, v, cotangent = operands(2)
    hidden = np.triu(np.ones((LENGTH, LENGTH), bool), 1) if mode else np.zeros((LENGTH, LENGTH), bool)
    expected = [attention(q, k, v, hidden), *gradients(q, k, v, cotangent, hidden)]
    move = LAYOUTS[layout][0]
    for rank, found in enumerate(
        simulate(by_kernel, ranks, platform="mindspore", args=(degree, layout, mode, style, named))
    ):
        size = LENGTH // ranks
        for value, wanted in zip(found, expected, strict=True):
            part = move(wanted[:, :, rank * size : (rank + 1) * size])
            np.testing.assert_allclose(value, part, rtol=2e-4, atol=1e-5)


def plain(degree):
    """A module of matrix products with a mask that has all keys as columns: this rank's result."""
    platform = get_platform()
    mesh = init_device_mesh("cpu", (platform.get_world_size(),), mesh_dim_names=("cp",))
    module = module_of()
    ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=degree).apply(module, mesh)
    rank, size = mesh.get_local_rank(), LENGTH // mesh.size()
    first = rank // degree * degree * size
    mask = np.triu(np.full((LENGTH, LENGTH), -1e30, np.float32), 1)[first : first + degree * size]
    q, k, v = (platform.from_numpy(np.ascontiguousarray(x[:, :, rank * size :][:, :, :size])) for x in operands(4)[:3])
    return platform.tensor_to_numpy(module(q, k, v, platform.from_numpy(mask)))


@pytest.mark.parametrize("ranks, degree", [(2, 1), (2, 2), (4, 2)])
def test_modules_without_a_fused_kernel(ranks, degree, platform_name):
    """A module that takes a mask over all keys computes this rank's part, on both frameworks."""
    q, k, v, _ = operands(4)
    expected = attention(q, k, v, np.triu(np.ones((LENGTH, LENGTH), bool), 1))
    size = LENGTH // ranks
    for rank, found in enumerate(simulate(plain, ranks, platform=platform_name, args=(degree,))):
        np.testing.assert_allclose(found, expected[:, :, rank * size : (rank + 1) * size], rtol=2e-4, atol=1e-5)


def refusals():
    """What is refused, and its words."""
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    module = module_of()

    def message(call):
        with pytest.raises((PlanError, MeshError)) as caught:
            call()
        return str(caught.value)

    odd = platform.from_numpy(array(2, 3, 3, 3))
    ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=2).apply(module, mesh["cp"])
    kernel = type("Kernel", (), {"sparse_mode": 0, "next_tokens": 0, "head_num": 3})()
    causal = module_of(kernel)
    ContextParallel(seq_dim=2, head_dim=1).apply(causal, mesh["cp"])
    return [
        message(lambda: ContextParallel(use_local_output=False)),
        message(lambda: ContextParallel(ulysses_degree=3).apply(module, mesh["cp"])),
        message(lambda: AsyncContextParallel(ulysses_degree=2).apply(module, mesh)),
        message(lambda: module(odd, odd, odd)),
        message(lambda: module(odd, odd)),
        message(lambda: causal(odd, odd, odd)),
    ]


def test_what_does_not_fit_is_refused(platform_name):
    """Degrees, meshes, heads and kernels that do not fit are refused with what to change."""
    for found in simulate(refusals, 4, platform=platform_name):
        local, degree, axes, heads, missing, kernel = found
        assert local == (
            "ContextParallel: use_local_output=False is not supported; wrap the output by DTensor.from_local"
        )
        assert degree.startswith("ContextParallel: ulysses_degree=3 must divide the size of one axis, not of ")
        assert axes.startswith("AsyncContextParallel: ulysses_degree=2 must divide the size of one axis, not of ")
        assert heads == "ContextParallel: dim 1 (heads) of [2, 3, 3, 3] is not divisible by 2 ranks"
        assert missing == "ContextParallel: the module is called without value, argument 2"
        assert kernel == (
            "ContextParallel: a kernel of sparse_mode 0 counts next_tokens from a rank's first query; compress the "
            "causal mask (use_attn_mask_compression), which is sparse_mode 2"
        )
