"""Random numbers of DTensors: their bits depend on seed, call and element; streams of ranks and threads."""

from __future__ import annotations

import contextvars
import threading

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.factories import rand, randn
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import current_platform
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.transport.base import active_transport
from hyper_parallel.verify import launch
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.simulate import simulate

PLACEMENTS = (Replicate(), Shard(0), Shard(1))


def _signatures():
    """The bytes of every kind of random tensor, gathered on this rank, for every placement."""
    return [_signature_of(placement) for placement in PLACEMENTS]


def _signature_of(placement):
    platform = current_platform()
    world = active_transport().world_size
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    random.manual_seed(7, mesh)
    single, double = (platform.str_to_dtype(name) for name in ("float32", "float64"))
    draws = [make(7, 5, device_mesh=mesh, placements=[placement], dtype=kind)
             for make in (rand, randn) for kind in (single, double)]  # fmt: skip
    ones = platform.wrap(platform.from_numpy(np.ones((7, 5), np.float32)), Layout.place(mesh, [Replicate()], (7, 5)))
    draws.append(platform.dispatcher.ops.dropout(ones.redistribute(placements=[placement]), 0.3, True))
    return [platform.tensor_to_numpy(value.full_tensor()).tobytes() for value in draws]


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_bits_are_equal_for_layouts_worlds_and_frameworks():
    """One seed gives the same bits whole, by rows and by columns, on 1, 3 and 6 ranks, on both frameworks."""
    expected = simulate(_signatures, 1, "torch")[0]
    assert expected == [expected[0]] * len(PLACEMENTS)
    assert len(set(expected[0])) == 5
    for world in (1, 3, 6):
        for platform in ("torch", "mindspore"):
            assert simulate(_signatures, world, platform, timeout=300) == [expected] * world


def mask():
    """Sixty random booleans, of which this rank samples its shard."""
    mesh = init_device_mesh("cpu", (2,))
    return random.bernoulli(Layout.place(mesh, [Shard(0)], (60,)), 0.5).tolist()


def in_thread(body, name="other"):
    """Return what ``body`` returned or raised in a thread of this rank."""
    masks = []

    def call():
        try:
            masks.append(body())
        except UnsupportedOperatorError as error:
            masks.append(str(error))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(call,), name=name)
    thread.start()
    thread.join()
    return masks[0]


def test_threads_draw_from_the_stream_of_their_rank(platform_name):
    """A new thread continues its rank's stream: it depends on the rank's seed and earlier calls."""

    def rank():
        masks = []
        for seed in (7, 8, 9):
            random.manual_seed(seed)
            masks.append(in_thread(mask))
            assert random.get_rng_state() == (seed, 1)
            masks.append(in_thread(mask))  # the first thread has ended
        random.manual_seed(7)
        assert [mask(), mask()] == masks[:2]
        return len({tuple(value) for value in masks}) == 6

    assert simulate(rank, 2, platform_name) == [True, True]


def test_two_threads_do_not_share_a_stream(platform_name):
    """A second thread that samples beside a living one is refused; the message advises a stream of its own."""

    def rank():
        random.manual_seed(3)
        mask()
        refused = in_thread(mask, "worker")
        first = random.get_rng_state()

        def own():
            with random.named_stream("worker"):
                return [mask(), mask(), random.get_rng_state()[1]]

        mine = in_thread(own)
        again = in_thread(own)
        assert random.get_rng_state() == first
        random.manual_seed(3)
        assert in_thread(own)[:2] == mine[:2]
        assert mine[2:] + again[2:] == [2, 4]
        random.manual_seed(4)
        masks = [mask(), *mine[:2], *again[:2], *in_thread(own)[:2]]
        return refused, threading.current_thread().name, len({tuple(value) for value in masks})

    for refused, name, different in simulate(rank, 2, platform_name):
        assert different == 7
        assert refused == (
            f"thread 'worker' samples random numbers of DTensors, and so does thread {name!r}; their order, and so the "
            "numbers, would differ between ranks; give this thread a stream of its own: "
            "`with hyper_parallel.core.dtensor.random.named_stream(name):`, with the same name on all ranks"
        )


def test_what_is_set_aside_is_of_one_thread(platform_name):
    """While one thread replays, the rank's stream continues for others and is never rewound."""

    def rank():
        random.manual_seed(3)
        start = random.get_rng_state()
        first = mask()
        with random.replay(start):
            assert mask() == first
            random.manual_seed(11)
            with random.preserve_state():
                mask()
            assert random.get_rng_state() == (11, 0)
            with pytest.raises(UnsupportedOperatorError) as raised, random.named_stream("x"):
                pass
        assert random.get_rng_state() == (3, 1)
        return str(raised.value)

    message = (
        "named_stream('x'): a recomputed function, or one in preserve_state(), samples from one stream; enter the "
        "named stream around it"
    )
    assert simulate(rank, 2, platform_name) == [message] * 2


def test_ranks_of_one_process_have_streams_of_their_own(platform_name):
    """Each rank samples its part of the same mask in any order of ranks; the caller's stream is unchanged."""

    def rank():
        random.manual_seed(5)
        from hyper_parallel.platform.select import get_platform

        get_platform().transport().barrier((0, 1))
        return mask() + mask()

    random.manual_seed(1)
    masks = simulate(rank, 2, platform_name)
    assert random.get_rng_state() == (1, 0)
    whole = np.array(masks).reshape(2, 2, 30)
    assert not (whole[0] == whole[1]).all()
    assert simulate(rank, 2, platform_name) == masks


KINDS = ("data parallel", "tensor parallel", "sequence parallel")


def torch_run(kind, seed):
    """Train with dropout on this rank; return the bytes of losses, gradients and weights."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from hyper_parallel.platform.torch.pytorch_data_parallel import rank_order_hook

    hp.use_deterministic(seed)
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(5), torch.nn.Linear(5, 7), torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Linear(7, 5)
    )
    x = torch.randn(2 * size, 5, 5)
    if kind == "data parallel":
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, rank_order_hook)
        torch.manual_seed(seed + rank)
        x = x.chunk(size)[rank]
    else:
        mesh = hp.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        plan = {"1": hp.ColwiseParallel(use_local_output=False), "4": hp.RowwiseParallel()}
        if kind == "sequence parallel":
            plan["0"] = hp.SequenceParallel()
            plan["1"] = hp.ColwiseParallel(input_layouts=hp.Shard(1), use_local_output=False)
            x = hp.distribute_tensor(x, mesh, [hp.Shard(1)])
        model = hp.parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    values = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        values += [bytes_of(value) for value in (loss, *(weight.grad for weight in model.parameters()))]
        optimizer.step()
    return values + [bytes_of(weight) for weight in model.parameters()]


def bytes_of(value):
    """The bytes of this rank's part of a tensor."""
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.detach().contiguous().numpy().tobytes()


def mindspore_run(kind, seed):
    """Train with dropout on this rank, MindSpore's ways; return the bytes of losses, gradients and weights."""
    import mindspore as ms
    from mindspore import nn, ops

    hp.use_deterministic(seed)
    size = hp.get_platform().transport().world_size
    model = nn.SequentialCell(nn.LayerNorm((5,)), nn.Dense(5, 7), nn.Dropout(p=0.3), nn.Dense(7, 5))
    mesh = hp.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    x = ms.ops.StandardNormal(seed=seed + 1)((2 * size, 5, 5))
    if kind == "data parallel":
        model = hp.distribute_module(model, mesh)
        x = hp.distribute_tensor(x, mesh, [hp.Shard(0)])
    else:
        plan = {"1": hp.ColwiseParallel(use_local_output=False), "3": hp.RowwiseParallel()}
        if kind == "sequence parallel":
            plan["0"] = hp.SequenceParallel()
            plan["1"] = hp.ColwiseParallel(input_layouts=hp.Shard(1), use_local_output=False)
            x = hp.distribute_tensor(x, mesh, [hp.Shard(1)])
        model = hp.parallelize_module(model, mesh, plan)
    weights = model.trainable_params()
    optimizer = nn.AdamWeightDecay(weights, 1e-2)
    step = hp.value_and_grad(lambda: ops.square(model(x)).mean(), None, weights)
    values = []
    for _ in range(3):
        loss, gradients = step()
        values += [host_bytes(value) for value in (loss, *gradients)]
        optimizer(tuple(gradients))
    return values + [host_bytes(weight) for weight in weights]


def host_bytes(value):
    """The bytes of this rank's part of a MindSpore tensor."""
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.asnumpy().tobytes()


RUNS = {"torch": torch_run, "mindspore": mindspore_run}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_are_equal(platform_name, kind, size):
    """Losses, gradients and weights of all ranks are equal bit for bit, and other ones with another seed."""
    first, second, other = (simulate(RUNS[platform_name], size, platform_name, (kind, seed)) for seed in (3, 3, 4))
    assert first == second
    assert all(ours[0] != others[0] and ours[-1] != others[-1] for ours, others in zip(first, other, strict=True))


def every_kind(run, seed):
    """The runs of all kinds, one after the other, on this rank; in one thread, as the last bits depend on threads."""
    with harness_of(hp.get_platform()).single_threaded():
        return [run(kind, seed) for kind in KINDS]


@pytest.mark.sweep
def test_two_runs_of_processes_are_equal_and_as_simulated(platform_name):
    """Three real processes compute the same bits twice, and simulated ranks the same."""
    require_transport(platform_name)
    arguments = (every_kind, 3, platform_name, (RUNS[platform_name], 5))
    assert launch(*arguments) == launch(*arguments) == simulate(*arguments)


@pytest.mark.parametrize(
    "seed, error, message",
    [
        (-1, ValueError, "use_deterministic: seed is -1; it must be from 0 to 4294967295"),
        (2**32, ValueError, "use_deterministic: seed is 4294967296; it must be from 0 to 4294967295"),
        (True, TypeError, "use_deterministic: seed must be an int, got bool"),
        (1.0, TypeError, "use_deterministic: seed must be an int, got float"),
    ],
)
def test_a_wrong_seed_is_refused(seed, error, message):
    """A seed that a generator would not take is refused before anything is set."""
    with pytest.raises(error) as raised:
        hp.use_deterministic(seed)
    assert str(raised.value) == message
