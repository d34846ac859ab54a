"""What stands in for Ascend devices on the CPU: values and gradients, what is refused, and that it ends."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.verify import verify_program
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def array(*shape, seed=0):
    """Normal float32 values from a fresh generator."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def slope(function, at, cotangent, step=1e-3):
    """The gradient of ``function`` of one array, by central differences in double precision."""
    gradient = np.zeros(at.shape)
    for index in np.ndindex(at.shape):
        ends = []
        for sign in (1, -1):
            moved = at.astype(np.float64)
            moved[index] += sign * step
            ends.append((function(moved) * cotangent).sum())
        gradient[index] = (ends[0] - ends[1]) / (2 * step)
    return gradient


def softmax_attention(query, key, value, hidden):
    """Attention of (batch, heads, length, width) in double precision."""
    scores = query @ key.swapaxes(-1, -2) * 0.5
    scores = np.where(hidden, -np.inf, scores)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True) @ value


def check_attention():
    """Each layout, masks and sparse modes, grouped heads; gradients by each operand."""
    import mindspore as ms
    from mindspore import Tensor
    from mindspore.ops.operations.nn_ops import FlashAttentionScore

    from hyper_parallel.verify.frameworks.mindspore.pretended_npu import pretended_npu

    query, key, value = array(2, 4, 3, 2), array(2, 2, 5, 2, seed=1), array(2, 2, 5, 2, seed=2)
    cotangent, mask = array(2, 4, 3, 2, seed=3), array(3, 5, seed=4) > 1
    causal, ending = np.triu(np.ones((3, 5), bool), 1), np.triu(np.ones((3, 5), bool), 3)

    def reference(q, k, v, hidden):
        return softmax_attention(q, np.repeat(k, 2, 1), np.repeat(v, 2, 1), hidden)

    there = {
        "BNSD": lambda x: x,
        "BSND": lambda x: x.swapaxes(1, 2),
        "BSH": lambda x: x.swapaxes(1, 2).reshape(2, x.shape[2], -1),
        "SBH": lambda x: x.transpose(2, 0, 1, 3).reshape(x.shape[2], 2, -1),
    }
    with pretended_npu() as calls:
        for layout, move in there.items():
            for hidden, options in (
                (mask, {}),
                (causal, {"sparse_mode": 2}),
                (ending, {"sparse_mode": 3}),
                (causal, {"next_tokens": 0}),
                (np.zeros((3, 5), bool), {}),
            ):
                kernel = FlashAttentionScore(4, scale_value=0.5, input_layout=layout, **options)
                given = Tensor(mask.astype(np.uint8)) if hidden is mask else None

                def run(q, k, v, kernel=kernel, given=given):
                    return kernel(q, k, v, None, None, None, given)[3]

                operands = [Tensor(np.ascontiguousarray(move(each))) for each in (query, key, value)]
                expected = reference(query, key, value, hidden)
                np.testing.assert_allclose(run(*operands).asnumpy(), move(expected), rtol=1e-5, atol=1e-6)
                weights = Tensor(np.ascontiguousarray(move(cotangent)))
                found = ms.grad(lambda *x, run=run, weights=weights: (run(*x) * weights).sum(), (0, 1, 2))(*operands)
                for position, gradient in enumerate(found):

                    def varied(x, position=position, hidden=hidden):
                        others = enumerate((query, key, value))
                        return reference(*[x if i == position else y for i, y in others], hidden)

                    wanted = slope(varied, (query, key, value)[position], cotangent)
                    np.testing.assert_allclose(gradient.asnumpy(), move(wanted), rtol=2e-4, atol=2e-5)
        with pytest.raises(UnsupportedOnBackend, match=r"^FlashAttentionScore: the CPU has no stand-in for packed"):
            FlashAttentionScore(4, input_layout="TND")(*operands)
        with pytest.raises(
            UnsupportedOnBackend, match=r"^FlashAttentionScore: the CPU has no stand-in for sparse_mode 4$"
        ):
            FlashAttentionScore(4, input_layout="SBH", sparse_mode=4)(*operands)
    return calls["FlashAttentionScore"]


def check_kernels():
    """Grouped products with an empty group, permutations of tokens and back, SwiGLU, RMS norm; with gradients."""
    import mindspore as ms
    from mindspore import Tensor, ops
    from mindspore.ops.auto_generate import GroupedMatmul

    from hyper_parallel.verify.frameworks.mindspore.pretended_npu import pretended_npu

    rows, matrices = array(5, 3), array(3, 3, 2, seed=1)
    experts = np.array([[2, 0], [1, 2], [0, 2]], np.int32)
    probabilities = array(3, 2, seed=2)

    def numpy_grouped(x, w):
        return np.concatenate([x[:2] @ w[0], x[2:] @ w[2]])

    with pretended_npu():
        grouped = GroupedMatmul(split_item=3, group_type=0)
        ends = Tensor(np.array([2, 2, 5]))
        cases = [
            (lambda x, w: grouped([x], [w], None, None, None, None, None, ends)[0], numpy_grouped, [rows, matrices]),
            (ops.swiglu, lambda x: x[:, :1] / (1 + np.exp(-x[:, :1])) * x[:, 1:], [array(4, 2, seed=4)]),
            (
                lambda x, gamma: ops.rms_norm(x, gamma, 1e-3)[0],
                lambda x, gamma: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * gamma,
                [rows, rows[0]],
            ),
            (
                lambda x: ops.moe_token_permute(x, Tensor(experts))[0],
                lambda x: x[[0, 2, 1, 0, 1, 2]],
                [array(3, 4, seed=5)],
            ),
            (
                lambda x, p: ops.moe_token_unpermute(x, ops.moe_token_permute(x[:3], Tensor(experts))[1], p),
                lambda x, p: (x[[[3, 0], [2, 4], [1, 5]]] * p[..., None]).sum(1),
                [array(6, 4, seed=6), probabilities],
            ),
        ]
        for function, reference, operands in cases:
            tensors = [Tensor(each) for each in operands]
            expected = reference(*operands)
            cotangent = array(*expected.shape, seed=9)
            np.testing.assert_allclose(function(*tensors).asnumpy(), expected, rtol=1e-5, atol=1e-6)
            seed = Tensor(cotangent)
            found = ms.grad(
                lambda *x, function=function, seed=seed: (function(*x) * seed).sum(), tuple(range(len(tensors)))
            )(*tensors)
            for position, gradient in enumerate(found if isinstance(found, tuple) else (found,)):

                def varied(x, position=position, operands=operands, reference=reference):
                    return reference(*[x if i == position else y for i, y in enumerate(operands)])

                wanted = slope(varied, operands[position], cotangent)
                np.testing.assert_allclose(gradient.asnumpy(), wanted, rtol=2e-3, atol=2e-4)
        for call, words in (
            (
                lambda: GroupedMatmul()([Tensor(rows)], [Tensor(matrices)], group_list=ends),
                "GroupedMatmul: the CPU has no stand-in for split_item other",
            ),
            (
                lambda: ops.moe_token_permute(Tensor(rows), Tensor(experts), 2),
                "moe_token_permute: the CPU has no stand-in for padding and dropped tokens",
            ),
            (
                lambda: ops.moe_token_unpermute(Tensor(rows), ends, None, True),
                "moe_token_unpermute: the CPU has no stand-in for padding",
            ),
        ):
            with pytest.raises(UnsupportedOnBackend, match=f"^{words}"):
                call()
    return True


def check_functions():
    """Every function against NumPy, and every method in place, through a transposed view as well."""
    import mindspore as ms
    from mindspore import Tensor, mint

    from hyper_parallel.verify.frameworks.mindspore.npu_functions import FUNCTIONS, METHODS
    from hyper_parallel.verify.frameworks.mindspore.pretended_npu import pretended_npu

    x, ids = array(3, 5), np.array([3, 1, 1, 0, 5])
    tensor, index = Tensor(x), Tensor(ids)
    with pretended_npu() as calls:
        order = np.argsort(x, -1, kind="stable")
        pairs = {
            "addcmul": (mint.addcmul(tensor, tensor, tensor, value=2), x + 2 * x * x),
            "arange": (mint.arange(1, 6, 2, dtype=ms.float32), np.arange(1, 6, 2)),
            "argsort": (mint.argsort(tensor), order),
            "cumsum": (mint.cumsum(index, 0), np.cumsum(ids)),
            "floor_divide": (mint.floor_divide(index, 2), ids // 2),
            "full": (mint.full((2, 3), 1.5, dtype=ms.float32), np.full((2, 3), 1.5)),
            "histc": (mint.histc(index, 6, 0, 6), [1, 2, 0, 1, 0, 1]),
            "index_select": (mint.index_select(tensor, 1, index[:4]), x[:, ids[:4]]),
            "nn.functional.softplus": (mint.nn.functional.softplus(tensor * 30), np.logaddexp(0, x * 30)),
            "norm": (mint.norm(tensor, dim=1), np.linalg.norm(x, axis=1)),
            "ones_like": (mint.ones_like(tensor, dtype=ms.bool_), np.ones((3, 5), bool)),
            "outer": (mint.outer(tensor[0], tensor[1]), np.outer(x[0], x[1])),
            "repeat_interleave": (mint.repeat_interleave(tensor, 2, 1), np.repeat(x, 2, 1)),
            "roll": (mint.roll(tensor, 2, 1), np.roll(x, 2, 1)),
            "scatter_add": (
                mint.scatter_add(tensor, 1, Tensor([[0, 0], [1, 4], [2, 2]]), mint.ones((3, 2))),
                x + np.array([[2, 0, 0, 0, 0], [0, 1, 0, 0, 1], [0, 0, 2, 0, 0]]),
            ),
            "sort": (mint.sort(tensor, descending=True)[0], -np.sort(-x)),
            "split": (mint.cat(mint.split(tensor, 2, 1)[::-1], 1), np.roll(x, -4, 1)[:, [0, 3, 4, 1, 2]]),
            "stack": (mint.stack([tensor, tensor + 1], 1), np.stack([x, x + 1], 1)),
            "topk": (mint.topk(tensor, 2, -1)[0], -np.sort(-x)[:, :2]),
            "tril": (mint.tril(tensor), np.tril(x)),
            "triu": (mint.triu(tensor, 1), np.triu(x, 1)),
            "zeros_like": (mint.zeros_like(tensor), np.zeros((3, 5))),
        }
        assert set(pairs) == set(FUNCTIONS)
        for name, (found, expected) in pairs.items():
            np.testing.assert_allclose(found.asnumpy(), expected, rtol=1e-5, atol=1e-6, err_msg=name)
            assert calls[f"mint.{name}"] >= 1

        pieces = ms.grad(lambda y: sum((k + 1) * (part**2).sum() for k, part in enumerate(mint.split(y, 2, 1))))(tensor)
        np.testing.assert_allclose(pieces.asnumpy(), 2 * x * [1, 1, 2, 2, 3], rtol=1e-6)

        assert mint.histc(tensor, 4).asnumpy().sum() == x.size
        counts = Tensor(np.array([0, 2, 1]))
        np.testing.assert_array_equal(mint.repeat_interleave(tensor, counts, 0).asnumpy(), x[[1, 1, 2]])
        np.testing.assert_array_equal(mint.repeat_interleave(index, 2).asnumpy(), np.repeat(ids, 2))
        np.testing.assert_allclose(mint.norm(tensor, 1, 1).asnumpy(), np.abs(x).sum(1), rtol=1e-6)

        written = {
            "add_": (lambda t: t.add_(tensor.T, alpha=2), 3 * x),
            "div_": (lambda t: t.div_(2), x / 2),
            "fill_": (lambda t: t.fill_(3), np.full((3, 5), 3)),
            "index_add_": (
                lambda t: t.index_add_(0, Tensor([4, 4]), mint.ones((2, 3))),
                x + np.array([0, 0, 0, 0, 2]),
            ),
            "mul_": (lambda t: t.mul_(2), 2 * x),
            "scatter_": (lambda t: t.scatter_(0, Tensor([[1, 0, 1]]), 7.0), np.where(np.eye(3, 5, 1) == 9, 0, x)),
            "sub_": (lambda t: t.sub_(1), x - 1),
            "zero_": (lambda t: t.zero_(), 0 * x),
        }
        assert {*written, "normal_"} == set(METHODS)
        for name, (write, expected) in written.items():
            if name == "scatter_":
                expected[0, 1], expected[1, 0], expected[2, 1] = 7, 7, 7
            base = Tensor(x.copy())
            view = base.T
            assert write(view) is view, name
            np.testing.assert_allclose(base.asnumpy(), expected, rtol=1e-6, err_msg=name)
        drawn = mint.zeros((100, 20)).normal_(3.0, 0.5).asnumpy()
        assert abs(drawn.mean() - 3) < 0.1
        assert abs(drawn.std() - 0.5) < 0.1
        used = dict(calls)
    assert mint.split.__module__.startswith("mindspore.")
    assert calls == used
    return True


def check_dtensors_and_cells():
    """DTensors keep the library's own operators; cells leave the meta device."""
    import mindspore as ms
    from mindspore import Parameter, Tensor, mint, nn

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.verify.frameworks.mindspore.pretended_npu import pretended_npu

    with pretended_npu() as calls:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = array(3, 5)
        placed = distribute_tensor(Tensor(x), mesh, [Shard(0)])
        np.testing.assert_allclose(mint.topk(placed, 2, -1)[0].full_tensor().asnumpy(), -np.sort(-x)[:, :2])
        placed.mul_(2)
        np.testing.assert_allclose(placed.full_tensor().asnumpy(), 2 * x)
        assert calls["mint.topk"] == calls["Tensor.mul_"] == 0
        if not hasattr(nn.Cell, "to_empty"):  # of MindSpore 2.10
            return True
        with ms.DeviceCtx("meta"):
            cell = nn.Cell()
            cell.weight = Parameter(mint.empty((2, 3), dtype=ms.float32), name="weight")
        cell.to_empty()
        cell.weight.fill_(2)
        np.testing.assert_array_equal(cell.weight.asnumpy(), np.full((2, 3), 2))
    return True


@pytest.mark.parametrize(
    "check, ranks", [(check_attention, 1), (check_kernels, 1), (check_functions, 1), (check_dtensors_and_cells, 2)]
)
def test_stand_ins_compute_what_the_devices_do(check, ranks):
    """Values, gradients, refusals and the end of what stands in for kernels of Ascend devices."""
    assert all(simulate(check, ranks, platform="mindspore"))


@pytest.mark.parametrize(
    "call, summary",
    [
        ("ops.rms_norm(x, x[0])", "RuntimeError: The kernel RmsNorm unregistered."),
        pytest.param(  # the text of other kernels, as the first
            "ops.LARSUpdate()(x, x, x, x, 0.1, 0.1)",
            "RuntimeError: Unsupported op [LARSUpdate] on CPU, ",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_a_kernel_that_the_cpu_lacks_is_named_with_what_stands_in(call, summary, tmp_path, monkeypatch):
    """The error of a program that calls an operator of Ascend devices names it, and the option that helps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        f"import mindspore\nfrom mindspore import ops\nx = mindspore.Tensor([[1.0, 2.0]])\nprint({call})\n"
    )
    with pytest.raises(InputError) as caught:
        verify_program("train.py", 2, platform="mindspore")
    first, advice = str(caught.value).splitlines()[:2]
    assert first.startswith(f"train.py fails on one rank, which is the reference: {summary}")
    assert advice == (
        "MindSpore's CPU has no such kernel; --pretend npu computes some of them from others (docs/stacks.md)"
    )
