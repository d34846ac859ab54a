"""Activations that are not kept: measured footprints, random numbers, and calls that cannot be recomputed."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.errors import UnsupportedOnBackend, UnsupportedOperatorError
from hyper_parallel.platform.contract.memory import SpillFile
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate
from workshop.conformance.results import measure


@pytest.mark.slow
def test_memory_is_saved_as_promised(platform_name, reports):
    """In a 12-layer transformer checkpointing and swapping each add at most half of what plain training does.

    Keeping products is between. A model of 8 GiB is laid out over 8 ranks in 2 s, and no process grows by any of it
    (the weights are 1 GiB each, and a rank's part 128 MiB); a shard is filled in place, and what filling draws with, in
    float64 too, is bounded.
    """
    try:
        platform_named(platform_name).create_selective_checkpoint_contexts([])
    except UnsupportedOnBackend as refusal:
        pytest.skip(str(refusal))
    footprint = measure(platform_name)
    footprint.write(reports)
    assert footprint.peaks["checkpoint"] <= 0.5 * footprint.peaks["plain"], footprint
    assert footprint.peaks["swap"] <= 0.5 * footprint.peaks["plain"], footprint
    assert footprint.peaks["checkpoint"] < footprint.peaks["selective"] <= 0.9 * footprint.peaks["plain"], footprint
    built = footprint.building
    assert built["parameters"] > 8 << 30
    assert built["seconds"] < 2
    assert built["grown"] < 4 << 20
    assert built["shard"] == 8 << 20
    assert built["filling"] < built["shard"] + (2 << 20)
    assert footprint.ok


def test_a_spill_file_gives_back_what_it_took():
    """Arrays of any dtype and shape are read back in any order, each in memory of its own."""
    file, arrays = SpillFile(), [np.arange(6.0).reshape(2, 3), np.zeros((0, 2)), np.array(True), np.int32([7])]
    records = [file.write(array) for array in arrays]
    for array, record in reversed(list(zip(arrays, records, strict=True))):
        np.testing.assert_array_equal(record.array(), array, strict=True)
    first = records[0].array()
    first[:] = 9
    np.testing.assert_array_equal(records[0].array(), arrays[0])


@pytest.mark.platforms("torch")
def test_recomputed_dropout_of_a_dtensor_samples_the_same_mask():
    """A checkpointed dropout of a DTensor samples the same mask in its second run as in the first."""

    def rank():
        import torch

        from hyper_parallel import DTensor, Shard, init_device_mesh

        platform = platform_named("torch")
        mesh = init_device_mesh("cpu", (2,))
        local = torch.ones(64, 3, requires_grad=True)
        x = DTensor.from_local(local, mesh, [Shard(0)])
        y = platform.checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), x)
        values = y.to_local().detach().clone()
        y.sum().backward()
        return torch.equal(local.grad, values), 0 < values.count_nonzero() < values.numel()

    assert simulate(rank, 2, "torch") == [(True, True)] * 2


@pytest.mark.platforms("mindspore")
def test_what_cannot_be_run_again_is_refused():
    """Recomputing nn.Dropout of MindSpore on CPU, which samples another mask, is an error."""

    def rank():
        import mindspore
        from mindspore import Tensor, nn

        platform = platform_named("mindspore")
        drop = nn.Dropout(p=0.5)
        drop.set_train()
        try:
            mindspore.grad(lambda x: platform.checkpoint(drop, x).sum())(Tensor(np.ones((8, 9), np.float32)))
        except UnsupportedOperatorError as error:
            return str(error)
        return "nothing"

    (text,) = simulate(rank, 1, "mindspore")
    assert "checkpoint: running again gave a different result, so its gradients would be wrong" in text
