"""Selective checkpointing: kept operators do not run again, and nothing else changes."""

from __future__ import annotations

from enum import Enum

import numpy as np
import pytest

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.checker.shards import local_shard
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

A, B, C = (np.random.default_rng(seed).uniform(0.5, 2.0, (9, 9)) for seed in (5, 6, 7))


class Policy(Enum):
    """A policy with the member names of PyTorch's own."""

    MUST_SAVE = 0
    PREFER_RECOMPUTE = 3


def _every_second():
    seen = []

    def policy(_, name, *__):
        if name == "MatMulExt":
            seen.append(name)
        return name == "MatMulExt" and len(seen) % 2 == 1

    return policy


# Made anew for every forward, with the number of products, of two, that backward does not compute again.
POLICIES = {
    "names": (lambda: ["MatMulExt"], 2),
    "truths": (lambda: lambda _, name, *__, **___: name == "MatMulExt", 2),
    "policies": (lambda: lambda _, name, *__: Policy.MUST_SAVE if name == "MatMulExt" else Policy.PREFER_RECOMPUTE, 2),
    "everything": (lambda: lambda *_: True, 2),
    "every second one": (_every_second, 1),
    "nothing": (list, 0),
}


def _counting(log):
    from mindspore.utils import MsDispatchMode

    class Counting(MsDispatchMode):
        """Record the matmuls that are computed."""

        def __ms_dispatch__(self, func, args, kwargs=None):
            """Log and run."""
            log.append(func.name)
            return func(*args, **(kwargs or {}))

    return Counting()


def _gradients(placement):
    """Value, gradients and number of matmuls: plain, then by every policy."""
    from mindspore import mint

    platform = platform_named("mindspore")
    mesh = init_device_mesh("cpu", (platform.get_world_size(),), mesh_dim_names=["tp"])
    layout = Layout.place(mesh, (placement,), A.shape)
    x, y, seed = (platform.wrap(platform.from_numpy(local_shard(array, layout, 0)), layout) for array in (A, B, C))

    def block(x, y):
        """Two products, one with a pending reduction, dropout, views and a write to elements."""
        z = mint.matmul(x, mint.transpose(y, 0, 1))
        z = mint.nn.functional.dropout(z.sin(), 0.3, True) * z
        return mint.matmul(z, y).sin()

    results = {}
    for name in ("plain", *POLICIES):
        contexts = lambda name=name: platform.create_selective_checkpoint_contexts(POLICIES[name][0]())  # noqa: E731
        random.manual_seed(3)
        log = []

        def loss(x, y, name=name, contexts=contexts):
            out = block(x, y) if name == "plain" else platform.checkpoint(block, x, y, context_fn=contexts)
            return (out * seed).sum()

        with _counting(log):
            value, grads = platform.value_and_grad(loss, (0, 1))(x, y)
        whole = [array.full_tensor().asnumpy().tolist() for array in grads]
        results[name] = float(value.full_tensor().asnumpy()), whole, log.count("MatMulExt")
    return results


@pytest.fixture
def modes():
    """Skip where MindSpore has no modes that see its kernels; the library refuses there."""
    from mindspore import utils

    if not hasattr(utils, "MsDispatchMode"):
        pytest.skip("MindSpore itself has no MsDispatchMode")


@pytest.mark.usefixtures("modes")
@pytest.mark.parametrize("world, place", [(2, Shard(1)), (3, Shard(0)), (3, Replicate())])
def test_kept_operators_do_not_run_again(world, place):
    """With every form of policy, loss and gradients are bitwise those without, and kept matmuls run once."""
    for results in simulate(_gradients, world, "mindspore", (place,)):
        value, grads, products = results.pop("plain")
        assert all(np.abs(array).max() > 0 for array in grads)
        for name, (other, others, ran) in results.items():
            assert (name, other, others) == (name, value, grads)
            assert (name, ran) == (name, products + 2 - POLICIES[name][1])


REFUSALS = [
    (
        "selective checkpointing: the kept output of Mul, call 1 of 1, was written to after it was computed; "
        "leave it out of the policy, or pass allow_cache_entry_mutation=True if what was written is what running "
        "again would compute"
    ),
    (
        "selective checkpointing: Mul ran 1 times in forward and more often when running again, so kept "
        "outputs cannot be matched with calls; the function must make the same calls both times"
    ),
    (
        "selective checkpointing: Mul ran 2 times in forward and 1 times when running again, so kept outputs "
        "cannot be matched with calls; the function must make the same calls both times"
    ),
    (
        "create_selective_checkpoint_contexts: the output of ReduceSum cannot be kept, since MindSpore "
        "differentiates this primitive where it runs; leave 'ReduceSum' out, or call the function of "
        "mindspore.mint or mindspore.ops in its place"
    ),
    (
        "create_selective_checkpoint_contexts: the policy returned 'save' for Mul; it must be a bool or a policy "
        "named MUST_SAVE, PREFER_SAVE, MUST_RECOMPUTE, PREFER_RECOMPUTE"
    ),
    (
        "create_selective_checkpoint_contexts: policy_fn_or_list is 'Mul'; it must be a list of names of "
        "MindSpore's operators, as ['MatMulExt', 'Dense'], or a function of (context, name, *args, **kwargs)"
    ),
]


def _errors():
    import mindspore
    from mindspore import Tensor, mint, ops

    platform = platform_named("mindspore")
    x, array, turns = Tensor(np.arange(1.0, 7.0).reshape(2, 3)), Tensor(np.ones((2, 3))), []

    def contexts(policy, **how):
        return lambda: platform.create_selective_checkpoint_contexts(policy, **how)

    def written(x):
        y = x * x
        z = y + x
        y.copy_(x)
        return z.sin()

    def longer(x):
        turns.append(0)
        return (x * x if len(turns) == 1 else x * array * x).sin()

    def shorter(x):
        turns.append(0)
        if len(turns) == 1:
            x * x
        return (x * x).sin()

    def legacy(x):
        return ops.ReduceSum()(x * x, 0).sin()

    cases = [
        (written, ["Mul"]),
        (longer, ["Mul"]),
        (shorter, ["Mul"]),
        (legacy, ["ReduceSum"]),
        (legacy, lambda *_: "save"),
        (legacy, "Mul"),
    ]
    messages = []
    for block, policy in cases:
        turns.clear()
        with pytest.raises((TypeError, UnsupportedOperatorError)) as caught:
            mindspore.grad(lambda x: platform.checkpoint(block, x, context_fn=contexts(policy)).sum())(x)  # noqa: B023
        messages.append(str(caught.value))
        # Whatever failed, the next gradient is right.
        kept = mindspore.grad(lambda x: platform.checkpoint(mint.square, x, context_fn=contexts(["Square"])).sum())(x)
        np.testing.assert_array_equal(kept.asnumpy(), 2 * x.asnumpy())
        assert x[0].shape == (3,)

    def overwritten(x):
        y = x * x
        y.copy_(x)
        return y.sin()

    context_fn = contexts(["Mul"], allow_cache_entry_mutation=True)
    grad = mindspore.grad(lambda x: platform.checkpoint(overwritten, x, context_fn=context_fn).sum())(x)
    np.testing.assert_allclose(grad.asnumpy(), np.cos(x.asnumpy()))
    return messages


@pytest.mark.usefixtures("modes")
def test_what_would_be_a_wrong_gradient_is_refused():
    """Written outputs, other calls when recomputed, primitives with autograd inside and bad policies are refused."""
    assert simulate(_errors, 1, "mindspore")[0] == REFUSALS
