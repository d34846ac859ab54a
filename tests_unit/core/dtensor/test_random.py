"""Random numbers of DTensors: their bits depend on seed, call and element; streams of ranks and threads."""

from __future__ import annotations

import contextvars
import threading

import numpy as np
import pytest

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.factories import rand, randn
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import current_platform
from hyper_parallel.transport.base import active_transport
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
