"""Activations that are recomputed, kept in part, or moved to the host: the same gradients and less memory."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.frameworks import harness_of

pytestmark = [pytest.mark.launch("processes"), pytest.mark.world_size(2)]

_SIZES = {"rehearsal": (256, 16), "night": (8192, 256)}  # rows of the batch, columns; 4 KiB and more are swapped
_BLOCKS = 4
MOST = {"recomputed": 0.75, "kept in part": 0.95, "swapped": 0.75}
"""The memory of a step at its peak, as a part of the plain step's."""


def _torch_blocks(columns):
    """Blocks of two layers of PyTorch."""
    from torch import nn

    return nn.Sequential(
        *(nn.Sequential(nn.Linear(columns, 3 * columns), nn.GELU(), nn.Linear(3 * columns, columns)) for _ in
          range(_BLOCKS))
    )  # fmt: skip


def _mindspore_blocks(columns):
    """The same of MindSpore."""
    from mindspore import nn

    return nn.SequentialCell(
        [nn.SequentialCell([nn.Dense(columns, 3 * columns), nn.GELU(), nn.Dense(3 * columns, columns)]) for _ in
         range(_BLOCKS)]
    )  # fmt: skip


_MAKERS = {"torch": _torch_blocks, "mindspore": _mindspore_blocks}


def _blocks(mesh, device, columns):
    """The blocks with the same weights on every rank, each column-wise and then row-wise."""
    from hyper_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from hyper_parallel.platform.select import current_platform

    platform, rng = current_platform(), np.random.default_rng(5)
    with harness_of(platform).on_device(device):
        blocks = _MAKERS[platform.platform_type](columns)
    shapes = {path: tuple(weight.shape) for path, weight in harness_of(platform).trainable(blocks).items()}
    weights = {path: rng.uniform(-1, 1, shape) / columns**0.5 for path, shape in shapes.items()}
    harness_of(platform).load_arrays(blocks, {path: weight.astype("float32") for path, weight in weights.items()})
    plan = {f"{block}.0": ColwiseParallel() for block in range(_BLOCKS)}
    return parallelize_module(blocks, mesh, {**plan, **{f"{block}.2": RowwiseParallel() for block in range(_BLOCKS)}})


def _batch(rows, columns, device):
    """Numbers from -1 to 1 on the device."""
    from hyper_parallel.platform.select import current_platform

    platform, array = current_platform(), np.linspace(-1, 1, rows * columns, dtype="float32")
    return platform.to_device(platform.from_numpy(array.reshape(rows, columns)), device)


def _gradients(platform, model, x):
    """The gradients of the sum of the squares of the output, by path."""

    def loss():
        out = model(x)
        return (out * out).sum()

    return harness_of(platform).training_step(model, loss).gradients


def _whole(platform, gradients):
    """Gradients as whole arrays."""
    whole = (each.full_tensor() if hasattr(each, "full_tensor") else each for each in gradients.values())
    return [platform.tensor_to_numpy(each) for each in whole]


def _ways(platform):
    """Wrappers of a block, by name; one keeps products of matrices and notes of a forward's operators which it kept."""
    asked = []

    def keeps(context, op, *_, **__):
        kept = op in harness_of(platform).kept_operators()
        if not context.is_recompute:  # PyTorch before 2.13 asks again when it recomputes
            asked.append(kept)
        return kept

    def contexts():
        return platform.create_selective_checkpoint_contexts(keeps)

    return asked, {
        "plain": lambda block: block,
        "recomputed": platform.ckpt_wrapper,
        "kept in part": lambda block: platform.ckpt_wrapper(block, context_fn=contexts),
        "swapped": platform.swap_wrapper,
    }


def _step(mesh, device, wrap, rows, columns):
    """Return gradients on the host, the most bytes beyond those of the weights, and how often a block has run."""
    from hyper_parallel.platform.select import current_platform

    platform, model, runs = current_platform(), _blocks(mesh, device, columns), []
    for block in range(_BLOCKS):
        platform.register_forward_hook(model[block][1], lambda *_: runs.append(1))
        model[block] = wrap(model[block])
    x = platform.set_tensor_requires_grad(_batch(rows, columns, device))
    with harness_of(platform).on_device(device):
        most = _nothing if device == "cpu" else harness_of(platform).peak_bytes(device)
        before = most()
        gradients = _gradients(platform, model, x)
        peak = most() - before
    return [*_whole(platform, gradients), *_of_leaf(platform, x)], peak, len(runs)


def _nothing():
    """The bytes in use where nobody counts them."""
    return 0


def _of_leaf(platform, x):
    """The gradient of the batch, where backward leaves it."""
    gradient = getattr(x, "grad", None)
    return [] if gradient is None else [platform.tensor_to_numpy(gradient)]


def test_every_way_gives_the_same_gradients_and_takes_less_memory(mesh, device, effort, counts_memory):
    """Recomputed, kept in part and swapped to the host: equal gradients, lower peaks where the device counts memory."""
    from hyper_parallel.platform.select import current_platform

    asked, ways = _ways(current_platform())
    steps = {name: _step(mesh, device, wrap, *_SIZES[effort]) for name, wrap in ways.items()}
    plain, most, _ = steps.pop("plain")
    for name, (gradients, peak, _) in steps.items():
        assert len(gradients) == len(plain) >= 4 * _BLOCKS
        assert all(map(np.array_equal, plain, gradients)), name
        assert not counts_memory or peak < MOST[name] * most, f"{name}: {peak} of {most} bytes"
    assert {name: runs for name, (_, _, runs) in steps.items()} == {
        "recomputed": 2 * _BLOCKS, "kept in part": 2 * _BLOCKS, "swapped": _BLOCKS,
    }  # fmt: skip
    assert asked.count(True) == 2 * _BLOCKS
    assert False in asked


def test_activations_moved_by_a_context_change_no_gradient(mesh, device):
    """What is saved inside async_save_on_cpu comes back unchanged, whatever its size."""
    from hyper_parallel.platform.select import current_platform

    platform = current_platform()

    def gradients(everything):
        model, x = _blocks(mesh, device, 40), _batch(6, 40, device)
        with harness_of(platform).on_device(device), platform.async_save_on_cpu(lambda _: everything):
            return _whole(platform, _gradients(platform, model, x))

    assert all(map(np.array_equal, gradients(everything=False), gradients(everything=True)))


def test_a_shard_costs_no_whole(mesh, device, counts_memory):
    """Scaling a sharded tensor takes the memory of its shard at the peak, where the device counts memory."""
    from hyper_parallel import Shard, zeros
    from hyper_parallel.platform.select import current_platform

    platform, rows, columns = current_platform(), 512, 1024
    x = zeros(rows, columns, device_mesh=mesh, placements=[Shard(0)])
    shard = x.to_local()
    assert tuple(shard.shape) == (rows // 2, columns)
    assert not platform.differing_device(shard, device)
    most = harness_of(platform).peak_bytes(device) if counts_memory else _nothing
    before = most()
    y = x * 2.0
    assert not counts_memory or 0 < most() - before < 1.25 * platform.get_tensor_storage_size(shard)
    assert tuple(y.to_local().shape) == tuple(shard.shape)
