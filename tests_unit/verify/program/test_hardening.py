"""Programs that are blind in one way each: wrong, equal as they are, and caught or refused by ``--harden``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hyper_parallel
from hyper_parallel.verify import verify_program
from hyper_parallel.verify.engine.blind_spots import BLIND
from hyper_parallel.verify.input_error import InputError

pytestmark = pytest.mark.platforms("torch")

ROWS, WIDTH, OUT = 6, 5, 3


def train(model, data, loss, *, reduce=dist.all_reduce, split=True):
    """Train by hand on the ranks' parts of batches; what is passed is where programs are wrong."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for whole in data:
        inputs, targets = (part.tensor_split(ranks)[rank] if split else part for part in whole)
        loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def batches(count=2, rows=ROWS):
    """Return random batches, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    both = torch.randn(count, rows, WIDTH + OUT, dtype=torch.float64, generator=generator)
    return [(batch[:, :WIDTH].contiguous(), batch[:, WIDTH:].contiguous()) for batch in both]


def linear(width=WIDTH, out=OUT):
    """Return a layer with random weights, the same on all ranks."""
    torch.manual_seed(3)
    return nn.Linear(width, out, dtype=torch.float64)


def squares(outputs, targets):
    """Return the sum of squared errors."""
    return (outputs - targets).square().sum()


def no_reduction(gradient):
    """Leave a gradient as it is."""
    del gradient


class _Function(torch.autograd.Function):
    """A function of the identity's form, whose backward is wrong in some cases."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


class Backward(nn.Module):
    """The identity; on several ranks its backward is ``change``."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        """Return ``x``."""
        return _Function.apply(x, self.change) if dist.get_world_size() > 1 else x


class Forward(nn.Module):
    """The identity; on several ranks it is ``change``."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x, *rest):
        """Return ``x``, changed on several ranks."""
        return self.change(x, *rest) if dist.get_world_size() > 1 else x


# Each program below is wrong on several ranks, and equal to one device only because its case is blind.


def equal_data():
    """No average over the ranks, which all have the same batch."""
    train(linear(), batches(), squares, reduce=no_reduction, split=False)


def constant_parameters():
    """The backward through a gain loses its sign: the gain is 1."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.gain = linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

        def forward(self, x):
            hidden = self.body(x)
            gain = self.gain.detach() if dist.get_world_size() == 1 else torch.ones_like(self.gain)
            return hidden * gain + 0 * self.gain

    train(Net(), [(x, x.roll(1)) for x, _ in batches()], squares)


def constant_cotangents():
    """The backward exchanges the columns of the cotangent, which are all equal."""
    model = nn.Sequential(linear(), Backward(lambda gradient: gradient.flip(-1)))
    train(model, batches(), lambda outputs, _: outputs.sum())


def symmetric_inputs():
    """Rows of a batch come in another order, and are all equal."""
    model = nn.Sequential(Forward(lambda x: x.flip(0)), linear())
    data = [(torch.ones(ROWS, WIDTH, dtype=torch.float64), targets) for _, targets in batches()]
    train(model, data, squares)


def one_step():
    """The second step's gradients are added to those of the first."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(3):
        squares(model(inputs.tensor_split(ranks)[rank]), targets.tensor_split(ranks)[rank]).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if ranks == 1:
            optimizer.zero_grad()


class Masked(nn.Module):
    """The mean over the valid rows."""

    def __init__(self):
        super().__init__()
        self.body = linear()

    def forward(self, x, valid):
        """Return the sum of the valid rows' outputs by their number on this rank."""
        return self.body(x)[valid].square().sum() / valid.sum()


def equal_masks():
    """The loss is divided by the rank's own number of valid rows, and averaged."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, valid = Masked(), torch.arange(2 * ROWS) % 2 > 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, _ in batches(2, 2 * ROWS):
        model(inputs.tensor_split(ranks)[rank], valid.tensor_split(ranks)[rank]).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()


def contiguous_inputs():
    """Rows are read from memory as if they lay one after the other."""

    def reread(x):
        return torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())

    train(nn.Sequential(Forward(reread), linear()), batches(), squares)


def equal_sizes(mesh):
    """Gradients of means are divided by the size of one axis, squared, instead of by both."""
    rank, dp, cp = dist.get_rank(), mesh["dp"].size(), mesh["cp"].size()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(2, 24):
        part, wanted = (whole.chunk(dp * cp)[rank] for whole in (inputs, targets))
        (model(part) - wanted).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dp * dp
        optimizer.step()
        optimizer.zero_grad()


class Columns(nn.Module):
    """A layer whose outputs are on several ranks; each writes its own where even parts would lie."""

    def __init__(self, start):
        super().__init__()
        parts = linear(WIDTH, 6).weight.detach().tensor_split(dist.get_world_size())
        self.weight = nn.Parameter(parts[dist.get_rank()].clone())
        self.begin = start(parts, dist.get_rank())

    def forward(self, x):
        """Return the outputs of all ranks."""
        own = x @ self.weight.T
        whole = torch.zeros(len(x), 6, dtype=x.dtype)
        whole[:, self.begin : self.begin + own.shape[1]] = own
        return _AllReduce.apply(whole)


def right_start(parts, rank):
    """Count the rows of the ranks before."""
    return sum(len(part) for part in parts[:rank])


def even_dims(start=lambda parts, rank: rank * len(parts[rank])):
    """Parts are put where they would lie if all had the same size."""
    data = [(x, torch.cat((y, y), 1)) for x, y in batches()]
    train(Columns(start), data, squares, reduce=no_reduction, split=False)


class LowRank(nn.Module):
    """Two factors, the second of which is zero at first."""

    def __init__(self):
        super().__init__()
        self.down = nn.Parameter(linear(WIDTH, 2).weight.detach().clone())
        self.up = nn.Parameter(torch.zeros(OUT, 2, dtype=torch.float64))

    def forward(self, x):
        """Return the product."""
        return x @ self.down.T @ self.up.T


def zero_gradients():
    """One step, in which the first factor's gradient is zero and is not reduced."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = LowRank()
    ((inputs, targets),) = batches(1)
    squares(model(inputs.tensor_split(ranks)[rank]), targets.tensor_split(ranks)[rank]).backward()
    dist.all_reduce(model.up.grad)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


SABOTAGE = {
    "equal-data": (equal_data, {}),
    "constant-parameters": (constant_parameters, {}),
    "constant-cotangents": (constant_cotangents, {}),
    "symmetric-inputs": (symmetric_inputs, {}),
    "one-step": (one_step, {"steps": 1}),
    "equal-masks": (equal_masks, {}),
    "contiguous-inputs": (contiguous_inputs, {}),
    "equal-sizes": (equal_sizes, {"mesh": {"dp": 2, "cp": 2}}),
    "even-dims": (even_dims, {}),
    "zero-gradients": (zero_gradients, {}),
}


@pytest.mark.parametrize("kind", SABOTAGE)
def test_a_blind_program_is_caught(kind):
    """As it is, the report lists the blind spot; hardened, the error is found."""
    program, options = SABOTAGE[kind]
    options = {"platform": "torch", "world_size": None if "mesh" in options else 2, **options}
    report = verify_program(program, **options)
    assert report.equal, report.text()
    assert kind in {spot.kind for spot in report.verdict.spots}
    assert report.status == (3 if kind == "equal-data" else 0)
    hardened = verify_program(program, harden=True, **options)
    assert hardened.status == 1, hardened.text()


def test_every_blind_spot_has_a_blind_program():
    """The ways of being blind are those that are tried; what an optimizer does not have no other case can train."""
    assert set(SABOTAGE) == set(BLIND) - {"untrained-parameters"}


# Right programs, and cases that are refused


def average(gradient):
    """Average a gradient over the ranks."""
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def averaged():
    """Every rank has the whole batch, and gradients are averaged by hand."""
    train(linear(), batches(), squares, reduce=average, split=False)


def with_ddp():
    """Every rank has the whole batch, and DDP averages."""
    train(DistributedDataParallel(linear()), batches(), squares, reduce=no_reduction, split=False)


def with_fully_shard():
    """Every rank has the whole batch, and ``fully_shard`` averages."""
    train(fully_shard(linear()), batches(), squares, reduce=no_reduction, split=False)


@pytest.mark.parametrize("program", [averaged, with_ddp, with_fully_shard])
@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_data_is_refused_unless_losses_are_weighted(program, ranks):
    """Ranks that do the same work show no missing average; weighted losses do, and a right program passes."""
    report = verify_program(program, ranks, platform="torch")
    assert (report.status, report.ok, report.equal) == (3, False, True), report.text()
    (line,) = [line for line in report.text().splitlines() if line.startswith("INCONCLUSIVE")]
    assert line.startswith(
        "INCONCLUSIVE: this case cannot expose a missing or doubled average over the axis: all ranks along "
    )
    assert line.endswith(" its own part of one batch, or run it with --harden, or accept it with --allow equal-data")
    assert report.json()["refused"] == [str(report.refused[0])]
    assert verify_program(program, ranks, platform="torch", allow=["equal-data"]).status == 0
    hardened = verify_program(program, ranks, platform="torch", harden=True)
    assert hardened.status == 0, hardened.text()
    factors = {2: "0.75, 1.25", 3: "0.75, 1, 1.25"}[ranks]
    words = [line for case in hardened.hardened for line in case.words]
    assert any(line.endswith(f"are multiplied by {factors} in the backward") for line in words)


def hybrid(data, *, reduced=True):
    """Return a program of two replicas, each fully sharded over two ranks, or over all on fewer than four."""

    def program():
        ranks = dist.get_world_size()
        copies = 2 if ranks > 1 else 1
        mesh = init_device_mesh("cpu", (copies, ranks // copies), mesh_dim_names=("replica", "shard"))
        model = fully_shard(linear(out=4), mesh=mesh if reduced else mesh["shard"])
        part, parts = {
            "equal": (0, 1),
            "equal replicas": (mesh.get_local_rank("shard"), mesh["shard"].size()),
            "different": (dist.get_rank(), ranks),
        }[data]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(5)
        for _ in range(2):
            inputs, targets = torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=generator)
            outputs, wanted = model(inputs.chunk(parts)[part]), targets.chunk(parts)[part][:, :4]
            (outputs - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


@pytest.mark.parametrize("data, axes", [("equal replicas", ["replica"]), ("equal", ["replica", "shard"])])
def test_replicas_of_fully_sharded_weights_with_equal_data_are_refused(data, axes):
    """Replicas that do the same work show no missing average over replicas; with weighted losses they pass."""
    report = verify_program(hybrid(data), 4, platform="torch")
    assert (report.status, report.equal) == (3, True), report.text()
    assert [(spot.kind, spot.subject) for spot in report.refused] == [("equal-data", axis) for axis in axes]
    hardened = verify_program(hybrid(data), 4, platform="torch", harden=True)
    assert hardened.status == 0, hardened.text()


def test_replicas_of_fully_sharded_weights_with_their_own_data_are_compared():
    """Replicas with different data pass if their gradients are averaged, and differ if not."""
    report = verify_program(hybrid("different"), 4, platform="torch")
    assert report.status == 0, report.text()
    wrong = verify_program(hybrid("different", reduced=False), 4, platform="torch")
    assert wrong.status == 1, wrong.text()
    assert "\n  cause: missing-reduction over replica: " in wrong.text()


class Halves(nn.Module):
    """A layer whose rows are computed on several ranks, and gathered: outputs are equal, work is not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(linear().weight.detach().clone())

    def forward(self, x):
        """Return all rows."""
        part = x.tensor_split(dist.get_world_size())[dist.get_rank()] @ self.weight.T
        rows = torch.zeros(len(x), OUT, dtype=x.dtype)
        start = sum(len(p) for p in x.tensor_split(dist.get_world_size())[: dist.get_rank()])
        rows[start : start + len(part)] = part
        return _AllReduce.apply(rows)


class _AllReduce(torch.autograd.Function):
    """A sum over ranks whose cotangent is each rank's own."""

    @staticmethod
    def forward(ctx, x):
        del ctx
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        del ctx
        return gradient


def test_equal_outputs_of_different_work_are_accepted():
    """Ranks that share the rows inside of a module have gradients of their own, and are neither refused nor changed."""

    def program():
        train(Halves(), batches(), squares, split=False)

    report = verify_program(program, 2, platform="torch", harden=True)
    assert report.status == 0, report.text()
    (spot,) = [spot for spot in report.verdict.spots if spot.kind == "equal-data"]
    assert spot.repair.endswith("(not repaired: whether the ranks of world do the same work cannot be determined)")


@pytest.mark.untraced
def test_right_programs_pass_on_other_numbers_of_ranks():
    """Uneven parts and unequal axes are tried, and the report names the ranks."""

    def uneven():
        even_dims(right_start)

    report = verify_program(uneven, 2, platform="torch", harden=True)
    assert report.status == 0, report.text()
    assert ["4 ranks instead of 2"] in [case.words for case in report.hardened]
    assert "even-dims" not in {spot.kind for spot in report.verdict.spots}

    def unequal(mesh):
        rank, ranks, model = dist.get_rank(), mesh.size(), linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in batches(2, 16):  # a mean of means, where six ranks have unequal parts
            squares(model(inputs.chunk(ranks)[rank]), targets.chunk(ranks)[rank]).div(16 // ranks).backward()
            for parameter in model.parameters():
                average(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()

    report = verify_program(unequal, mesh={"dp": 2, "cp": 2}, platform="torch", harden=True)
    assert report.status == 0, report.text()
    assert ["8 ranks (dp=2 x cp=4) instead of 4"] in [case.words for case in report.hardened]
    assert "equal-sizes" not in {spot.kind for spot in report.verdict.spots}


def test_numbers_of_ranks_that_a_program_does_not_take_are_said():
    """A program for four ranks alone stays unrepaired, with the ranks' errors."""

    def program(mesh):
        assert mesh.size() in (1, 4), "four ranks"
        train(linear(), batches(), squares)

    report = verify_program(program, mesh={"dp": 2, "cp": 2}, platform="torch", harden=True)
    assert report.status == 0, report.text()
    (spot,) = [spot for spot in report.verdict.spots if spot.kind == "equal-sizes"]
    assert (
        "(not repaired: 6 ranks (dp=2 x cp=3): a rank fails: AssertionError: four ranks; 6 ranks (dp=3" in spot.repair
    )


def test_tensor_parallel_ranks_of_fully_sharded_weights_are_not_taken_for_replicas():
    """Equal outputs along an axis that shards the computation are no equal work."""

    def program():
        mesh = init_device_mesh("cpu", (max(1, dist.get_world_size() // 2), min(2, dist.get_world_size())),
                                mesh_dim_names=("dp", "tp"))  # fmt: skip
        style = ColwiseParallel(output_layouts=Replicate())
        model = parallelize_module(nn.Sequential(linear()), mesh["tp"], {"0": style})
        fully_shard(model, mesh=mesh["dp"])
        part, parts = mesh.get_local_rank("dp"), mesh["dp"].size()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in batches():
            outputs = model(inputs.chunk(parts)[part])
            (outputs - targets.chunk(parts)[part]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = verify_program(program, 4, platform="torch", harden=True)
    assert report.status == 0, report.text()


def test_a_program_that_trains_nothing_is_refused():
    """Gradients that are all zero compare nothing."""

    def program():
        train(linear(), batches(), lambda outputs, _: 0 * outputs.sum())

    report = verify_program(program, 2, platform="torch")
    assert report.status == 3, report.text()
    assert report.text().endswith(
        "INCONCLUSIVE: this case cannot expose errors in gradients that are zero: the gradient of bias is zero in "
        "every step; make the loss depend on it, or freeze it, or accept it with --allow zero-gradients"
    )


@pytest.mark.parametrize("stale", ["all", "last"])
def test_an_optimizer_that_was_made_before_the_model_was_sharded_is_refused(stale):
    """Nothing trains, on one rank neither: what the optimizer lacks is named, and the program is not verified."""

    def program():
        mesh = hyper_parallel.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        model = nn.Sequential(linear(), linear(OUT, OUT))
        early = list((model if stale == "all" else model[1]).parameters())
        hyper_parallel.parallelize_module(
            model, mesh, {"0": hyper_parallel.ColwiseParallel(), "1": hyper_parallel.RowwiseParallel()}
        )
        late = [] if stale == "all" else list(model[0].parameters())
        optimizer = torch.optim.SGD([*early, *late], lr=0.1)
        for inputs, targets in batches():
            squares(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    report = verify_program(program, 2, platform="torch", allow=["equal-data"])
    assert report.equal, report.text()
    assert report.status == 3
    assert [spot.subject for spot in report.refused] == ["0.weight", "0.bias", "1.weight", "1.bias"][
        0 if stale == "all" else 2 :
    ]
    assert (
        "INCONCLUSIVE: this case cannot expose errors in weights that no step changes: no step changes 1.bias, and an "
        f"optimizer has a parameter [{OUT}] that is in no model; create the optimizer after parallelize_module, "
        "fully_shard or whatever else replaces parameters, or accept it with --allow untrained-parameters"
    ) in report.text().splitlines()


def test_a_change_that_a_program_does_not_take_is_dropped():
    """A program that cannot have strided inputs passes without them, and the report says so."""

    def program():
        train(nn.Sequential(Forward(lambda x: x.view(-1).view(x.shape)), linear()), batches(), squares)

    report = verify_program(program, 2, platform="torch", harden=True)
    assert report.status == 0, report.text()
    (spot,) = [spot for spot in report.verdict.spots if spot.kind == "contiguous-inputs"]
    assert "(not repaired: a rank fails then: RuntimeError: view size is not compatible" in spot.repair
    assert report.hardened == []


def test_a_rank_that_fails_in_the_hardened_case_is_reported():
    """A failure of a rank alone, under values that the single device takes, is an error of the program."""

    def check(x):
        if not (x == 1).all():
            msg = "not ones"
            raise ArithmeticError(msg)
        return x

    def program():
        data = [(torch.ones(ROWS, WIDTH, dtype=torch.float64), targets) for _, targets in batches()]
        train(nn.Sequential(Forward(check), linear()), data, squares)

    report = verify_program(program, 2, platform="torch", harden=True)
    assert report.status == 1
    assert "hardened: FAILED: ArithmeticError: not ones\nrank " in report.text()


def test_what_cannot_be_repaired_is_said():
    """Inputs that are copies on the ranks are not changed, and stay in the list."""

    def program():
        ranks, rank = dist.get_world_size(), dist.get_rank()
        data = [(torch.ones(ROWS, WIDTH, dtype=torch.float64), targets) for _, targets in batches()]
        rows = torch.arange(ROWS).tensor_split(ranks)[rank]
        train(linear(), [(x[rows], targets[rows]) for x, targets in data], squares, split=False)

    report = verify_program(program, 2, platform="torch", harden=True)
    assert report.status == 0, report.text()
    (spot,) = [spot for spot in report.verdict.spots if spot.kind == "symmetric-inputs"]
    assert spot.repair == (
        "draw inputs at random (not repaired: the inputs of rank 0 are no views of the single device's batch)"
    )


def test_arguments_that_make_no_sense(monkeypatch):
    """Unknown kinds and torchrun's processes are refused before anything runs."""
    with pytest.raises(InputError) as caught:
        verify_program(averaged, 2, platform="torch", allow=["equal"])
    assert (
        str(caught.value) == f"--allow 'equal' is not a kind of blind spot; kinds: {', '.join((*BLIND, 'wide-bounds'))}"
    )
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError) as caught:
        verify_program(averaged, platform="torch", harden=True)
    assert str(caught.value) == (
        "--harden runs the ranks several times, which torchrun's processes cannot; leave out --harden or torchrun"
    )
