"""Random operators on PyTorch: the same numbers for every layout, mesh and world size."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.core.dtensor import random, sampling
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.sampling import Philox
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.verify.checker.function import all_placements
from hyper_parallel.verify.checker.shards import local_shard
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


KNOWN = [  # counter, key, output: the reference vectors of Random123 whose key has no upper half
    (
        (0, 0, 0, 0),
        0,
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
]


def philox(counter, key):
    """Philox 4x64-10 as in its paper, with Python integers."""
    words, keys = list(counter), [key, 0]
    for _ in range(10):
        products = (0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2])
        (high0, low0), (high2, low2) = (divmod(number, 1 << 64) for number in products)
        words = [high2 ^ words[1] ^ keys[0], low2, high0 ^ words[3] ^ keys[1], low0]
        keys = [
            (number + weyl) % (1 << 64)
            for number, weyl in zip(keys, (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B), strict=True)
        ]
    return tuple(words)


def blocks(seed, call, first, count):
    """The words of consecutive blocks, each computed independently."""
    result = [philox((first + block, 0, call, 0), seed) for block in range(count)]
    return np.asarray(result, np.uint64).reshape(-1)


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_the_reference_is_philox(counter, key, expected):
    """The reference implementation of the tests gives the published vectors of Philox 4x64-10."""
    assert philox(counter, key) == expected


@pytest.mark.parametrize("seed, call", [(0, 0), (7, 1), ((1 << 64) - 1, (1 << 63) + 5)])
def test_the_generator_is_philox(seed, call):
    """The generator's blocks have the words of their counters, in any order and at any distance."""
    source = Philox(seed, call)
    for first, count in [(0, 3), (3, 2), (1 << 40, 2), (1, 1), (1, 1), ((1 << 64) - 1, 1), (0, 1)]:
        np.testing.assert_array_equal(source.words(first, count), blocks(seed, call, first, count))
    starts = [0, 2, 2, 5, 400, 403, 9000, 1 << 33]
    wanted = [blocks(seed, call, start, 2) for start in starts]
    np.testing.assert_array_equal(source.runs(np.asarray(starts, np.uint64), 2), wanted)
    assert source.runs(np.asarray([], np.uint64), 2).shape == (0, 8)


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout_twice": lambda x: F.dropout(F.dropout(x, 0.1), 0.3),
    "dropout_in_place": lambda x: F.dropout(x * 1, 0.5, inplace=True),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "bernoulli": lambda x: torch.bernoulli((x - 4).sigmoid()),
    "normal_": lambda x: torch.zeros_like(x).normal_(1.0, 3.0),
    "uniform_": lambda x: torch.zeros_like(x).uniform_(-1, 2),
    "bernoulli_": lambda x: torch.zeros_like(x).bernoulli_(0.3),
    "init": lambda x: torch.nn.init.normal_(torch.zeros_like(x), std=0.02),
    "kaiming": lambda x: torch.nn.init.kaiming_uniform_(torch.zeros_like(x)),
    "trunc": lambda x: torch.nn.init.trunc_normal_(torch.zeros_like(x)),
    "exponential": lambda x: torch.zeros_like(x).exponential_(2.0),
    "cauchy": lambda x: torch.zeros_like(x).cauchy_(1.0, 2.0),
    "geometric": lambda x: torch.zeros_like(x).geometric_(0.3),
    "log_normal": lambda x: torch.zeros_like(x).log_normal_(0.5, 0.25),
    "normal_around": lambda x: torch.normal(torch.zeros_like(x), torch.ones_like(x)),
    "randint": lambda x: torch.randint_like(x, 3, 9),
    "channel dropout": lambda x: F.dropout2d(x[..., None, None].expand(5, 3, 2, 2), 0.4),
    "channel dropout without samples": lambda x: F.dropout1d(x, 0.4),
    "channel dropout in place": lambda x: F.dropout2d((x * 1)[..., None, None], 0.4, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "alpha_dropout_in_place": lambda x: F.alpha_dropout(x * 1, 0.4, training=True, inplace=True),
    "alpha channel dropout": lambda x: F.feature_alpha_dropout(x[..., None], 0.4, training=True),
    "rrelu": lambda x: F.rrelu(x - 4, training=True),
    "rrelu in place": lambda x: F.rrelu(x - 4, training=True, inplace=True),
    "gumbel": lambda x: F.gumbel_softmax(x, 0.7),
    "hard gumbel": lambda x: F.gumbel_softmax(x, hard=True, dim=0),
    "fractional pooling": lambda x: F.fractional_max_pool2d(
        x[:, :, None, None].expand(5, 3, 4, 5).cumsum(3), 2, output_size=2
    ),
    "fractional pooling of a volume": lambda x: F.fractional_max_pool3d(
        x[:, :, None, None, None].expand(5, 3, 4, 4, 4).cumsum(4), 2, output_ratio=0.5, return_indices=True
    )[0],
}
COMPUTED = {name for name in DRAWS if any(word in name for word in ("dropout", "bernoulli", "rrelu", "gumbel", "pool"))}
COMPUTED.remove("bernoulli_")


def sampled(fn, array, mesh_shape):
    """Values under every placement, as whole arrays, equal on all ranks."""

    def run():
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=[f"m{axis}" for axis in range(len(mesh_shape))])
        result = []
        for placements in all_placements(array.ndim, len(mesh_shape)):
            layout = Layout.place(mesh, placements, array.shape)
            random.manual_seed(1234)
            local = torch.tensor(local_shard(array, layout, 5))
            out = fn(DTensor.from_local(local, mesh, placements, shape=array.shape))
            result.append(out.full_tensor())
        return result

    return [values for ranks in simulate(run, int(np.prod(mesh_shape)), "torch") for values in ranks]


@pytest.mark.parametrize("name", DRAWS)
def test_equal_for_every_layout(name):
    """The numbers depend on seed, call and global index: not on placement, mesh shape or world size."""
    array = np.random.default_rng(0).integers(1, 9, (5, 3)).astype(float)
    alone = sampled(DRAWS[name], array, (1,))[0].numpy()
    assert len(np.unique(alone)) > 1
    exact = name not in COMPUTED  # with, from partial values that are rounded
    for shape in ((2,), (3,), (2, 2)):
        for other in sampled(DRAWS[name], array, shape):
            if exact:
                assert (other.numpy() == alone).all()
            else:
                np.testing.assert_array_equal(other.numpy() == 0, alone == 0)
                np.testing.assert_allclose(other.numpy(), alone, rtol=1e-12)


def test_dropout_scales_and_keeps_the_mean():
    """Dropout keeps about the given share and divides it by the probability of keeping."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["dp"])
        x = DTensor.from_local(torch.ones(4000, requires_grad=True), mesh, [Shard(0)])
        out = F.dropout(x, 0.25)
        out.sum().backward()
        assert torch.equal(x.grad.to_local(), out.to_local().detach())
        return out.full_tensor()

    out = simulate(run, 2, "torch")[0]
    assert set(out.tolist()) == {0.0, float(torch.tensor(4 / 3))}
    assert abs(float((out == 0).double().mean()) - 0.25) < 0.02


def test_calls_differ_and_seeds_repeat():
    """Calls sample different masks, the same seed repeats them, and evaluation samples and costs nothing."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["dp"])
        x = DTensor.from_local(torch.ones(40), mesh, [Shard(0)])
        partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        random.manual_seed(7, mesh)
        first, second = F.dropout(x), F.dropout(x)
        state = random.get_rng_state()
        assert state == (7, 2)
        with random.preserve_state():
            third = F.dropout(x)
        with record_events() as log:
            assert F.dropout(partial, training=False).placements == (Partial(),)
        assert not log.collectives()
        assert random.get_rng_state() == state
        assert torch.equal(F.dropout(x).to_local(), third.to_local())
        assert not torch.equal(first.to_local(), second.to_local())
        random.manual_seed(7)
        return torch.equal(F.dropout(x).to_local(), first.to_local())

    assert simulate(run, 2, "torch") == [True, True]


def test_filling_a_partial_sum_is_refused():
    """Filling a Partial tensor with random numbers is refused before anything is sampled."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
        with pytest.raises(UnsupportedOperatorError, match=r"normal.*would have to change the layout of x"):
            DTensor.from_local(torch.ones(4), mesh, [Partial()]).normal_()
        return random.get_rng_state()

    assert simulate(run, 2, "torch") == [(0, 0), (0, 0)]


def test_communication_of_the_family():
    """Sampling communicates nothing; dropout of a partial sum reduces it first."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
        with record_events() as log:
            for placement in (Shard(0), Shard(1), Replicate()):
                x = DTensor.from_local(torch.ones(4, 2), mesh, [placement])
                F.dropout(x)
                torch.rand_like(x)
        assert log.collectives() == []
        with record_events() as log:
            F.dropout(DTensor.from_local(torch.ones(4, 2), mesh, [Partial()]))
        return log.collectives()

    assert simulate(run, 2, "torch") == [["reduce_scatter"]] * 2


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("shape", [(7, 5), (4, 6, 3), (9,), (), (5, 1, 3), (2, 3, 4, 5)])
def test_an_element_has_its_own_words(shape, each):
    """In every sampled box, element ``i`` has words ``i * each`` and following of the whole sequence."""
    size = int(np.prod(shape))
    words = blocks(99, 3, 0, size).view("<u8" if each == 2 else "<u4")[:size].reshape(shape)
    sides = [[(0, size), (0, max(1, size // 2)), (size // 2, size), (size - 1, size)] for size in shape]
    for box in itertools.product(*sides):
        local_shape = tuple(stop - start for start, stop in box)
        result = sampling.LocalRandomNumbers(
            local_shape, sampling.IndexRuns.of(shape, box), 99, 3, sampling.Distribution(each, lambda number: number)
        )
        np.testing.assert_array_equal(result.array(), words[tuple(slice(*side) for side in box)])


@pytest.mark.parametrize("digits", [24, 53])
def test_normal_numbers_are_normal(digits):
    """Normal numbers have the distribution's mean, variance, fourth moment and tails, and are independent."""
    mesh = DeviceMesh._interned("cpu", (1,), (0,), ("x",), 0)
    random.manual_seed(5)
    result = random.normal(Layout.place(mesh, [Replicate()], (400, 1000)), digits).astype(np.float64).reshape(-1)
    assert abs(result.mean()) < 0.01
    assert abs(result.var() - 1) < 0.01
    assert abs((result**4).mean() - 3) < 0.1
    assert abs((np.abs(result) > 2).mean() - 0.0455) < 0.002
    assert abs((result[::2] * result[1::2]).mean()) < 0.01
    assert abs((result[1:-1:2] * result[2::2]).mean()) < 0.01


MOMENTS = [
    # call, and the mean and the variance that the distribution has
    (lambda x: x.exponential_(2.0), 0.5, 0.25),
    (lambda x: x.geometric_(0.25), 4.0, 12.0),
    (lambda x: x.log_normal_(0.5, 0.25), np.exp(0.5 + 0.25**2 / 2), (np.exp(0.25**2) - 1) * np.exp(1 + 0.25**2)),
    (lambda x: torch.normal(x + 3.0, 2.0), 3.0, 4.0),
    (lambda x: torch.normal(1.5, x + 2.0), 1.5, 4.0),
    (lambda x: (x.cauchy_(1.0, 2.0) > 3.0).double(), 0.25, 0.1875),
]


@pytest.mark.parametrize("draw, mean, variance", MOMENTS)
def test_distributions_have_their_moments(draw, mean, variance):
    """A hundred thousand numbers have the mean and the variance of their distribution."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layout = Layout.place(mesh, [Shard(0)], (100_001,))
        zeros = torch.zeros(layout.local_shape, dtype=torch.float64)
        return draw(DTensor.from_local(zeros, mesh, [Shard(0)], shape=(100_001,))).full_tensor()

    (first, second) = simulate(run, 2, "torch")
    assert torch.equal(first, second)
    assert float(first.mean()) == pytest.approx(mean, rel=0.03)
    assert float(first.var()) == pytest.approx(variance, rel=0.08)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_multinomial_samples_the_same_indices_for_every_layout(world_size, repeats):
    """Multinomial samples the same indices for every layout as on one rank."""
    weights = torch.rand(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run():
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        result = []
        for where in (Replicate(), Shard(0), Shard(1)):
            layout = Layout.place(mesh, [where], (5, 7))
            shard = weights[tuple(slice(*bounds) for bounds in layout.local_box())].clone()
            random.manual_seed(3)
            x = DTensor.from_local(shard, mesh, [where], shape=(5, 7))
            result.append(torch.multinomial(x, 4, repeats).full_tensor().tolist())
        return result

    def alone():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        random.manual_seed(3)
        return torch.multinomial(DTensor.from_local(weights, mesh, [Replicate()]), 4, repeats).full_tensor().tolist()

    (expected,) = simulate(alone, 1, "torch")
    assert simulate(run, world_size, "torch") == [[expected] * 3] * world_size


@pytest.mark.parametrize("repeats", [False, True])
def test_multinomial_samples_by_weight(repeats):
    """Indices are sampled with the frequency of their weights; a weight of zero never is."""
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)

    def run():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        layout = Layout.place(mesh, [Shard(0)], (20_000, 4))
        rows = weights.expand(layout.local_shape).clone()
        x = DTensor.from_local(rows, mesh, [Shard(0)], shape=(20_000, 4))
        return torch.multinomial(x, 3, repeats).full_tensor()

    result = simulate(run, 3, "torch")[1]
    shares = torch.bincount(result[:, 0], minlength=4) / 20_000
    assert torch.allclose(shares.double(), weights, atol=0.02)
    assert repeats or all(len(set(row)) == 3 for row in result.tolist())


def test_what_multinomial_refuses():
    """Weights that are no distribution, and more samples than positive weights, raise on every rank."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = DTensor.from_local(torch.tensor([0.5, 0.0, 0.5]), mesh, [Replicate()])
        messages = []
        for call in (
            lambda: torch.multinomial(x, 4),
            lambda: torch.multinomial(x, 3),
            lambda: torch.multinomial(-x, 1),
            lambda: torch.multinomial(x.reshape(1, 1, 3), 1),
            lambda: torch.zeros_like(x).geometric_(1.5),
        ):
            with pytest.raises(RuntimeError) as raised:
                call()
            messages.append(str(raised.value))
        return messages

    assert simulate(run, 2, "torch")[0] == [
        "multinomial(x=f32[3]): cannot sample 4 of 3 weights without replacement",
        "multinomial: fewer than 3 weights are positive, and none may be drawn twice",
        "multinomial: weights must be finite, not negative, and not all zero",
        "multinomial(x=f32[1, 1, 3]): x has 3 dims; weights are a vector or a matrix of one vector per row",
        "geometric: p is 1.5; it must be between 0 and 1",
    ]


MISFITS = {
    "dropout": (
        lambda x: F.dropout(x, 1.5), (4, 3),
        "dropout(x=f64[4@tp, 3]): p is 1.5; it must be between 0 and 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
