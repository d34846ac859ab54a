"""Certificates of plans: rows for given sizes, on ranks that do not exist, and plans that have none."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from hyper_parallel import ColwiseParallel, Partial, RowwiseParallel, Shard
from hyper_parallel.cli import main
from hyper_parallel.verify import ModelCase, ParallelPlan
from hyper_parallel.verify.frameworks.contract.primitives import Graph, Input, Primitive, Step
from hyper_parallel.verify.frameworks.contract.sizes import ONE, Size
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.prove.laws import UnprovenError
from hyper_parallel.verify.prove.paired import complete_text, paired
from hyper_parallel.verify.prove.plan import certify

pytestmark = pytest.mark.platforms("torch")


def case():
    """Return two layers and a loss."""
    import torch

    def batch():
        return torch.ones(8, 12), torch.ones(8, 5)

    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.GELU(), torch.nn.Linear(16, 5))
    return ModelCase(lambda: model, [batch()], lambda out, _: (out**2).sum())


def plan_of(**down):
    """Return a plan whose last layer has these options."""
    return lambda _: ParallelPlan({"0": ColwiseParallel(), "2": RowwiseParallel(**down)}, batch={})


def test_of_a_plan():
    """Each row of an operator is proven for these sizes, and each call with plain tensors between styles."""
    certificate = certify(case, plan_of(), (4,), ("tp",), name="two layers")
    assert certificate.ok
    assert "linear" in {call.op for call in certificate.calls}
    assert {call.level for call in certificate.calls} == {"proven"}
    assert (certificate.plain > 0, certificate.open) == (True, [])
    assert certificate.reductions["forward all_reduce over tp for RowwiseParallel"] == 1
    text = certificate.text()
    count = len(certificate.calls)
    assert text.startswith(
        f"two layers on 4 ranks (tp=4)\nproven for these sizes: {count} of {count} rows of operators\n"
    )
    assert json.dumps(certificate.json())


def test_a_reduction_that_is_left_out():
    """A pending sum that leaves a module as a plain tensor has no certificate, and the module is named."""
    certificate = certify(case, plan_of(output_layouts=Partial()), (4,), ("tp",))
    assert not certificate.ok
    assert certificate.wrong[0] == "2: a value that is a pending sum over tp leaves as a plain tensor, not reduced"
    assert f"no certificate: {certificate.wrong[0]}" in certificate.text()


@pytest.mark.parametrize("odd", [0, 2, 4])
def test_one_layer_of_many_that_deviates(odd):
    """A fault in one of several equal layers is found, wherever it is, and its layer is named."""
    import torch

    def layers():
        pairs = ((torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(5))
        return torch.nn.Sequential(*(torch.nn.Sequential(*each) for each in pairs))

    def plan(faults):
        down = [{"output_layouts": Partial()} if layer in faults else {} for layer in range(5)]
        return {f"{layer}.0": ColwiseParallel() for layer in range(5)} | {
            f"{layer}.2": RowwiseParallel(**options) for layer, options in enumerate(down)
        }

    certificates = [
        certify(
            lambda: ModelCase(layers, [(torch.ones(4, 8), torch.ones(4, 8))], lambda out, _: (out**2).sum()),
            lambda _, faults=faults: ParallelPlan(plan(faults), batch={}),
            (2,),
            ("tp",),
        )
        for faults in ((), (odd,))
    ]
    assert certificates[0].ok, certificates[0].text()
    wrong = certificates[1].wrong
    assert wrong[0] == f"{odd}.2: a value that is a pending sum over tp leaves as a plain tensor, not reduced"
    assert not [line for line in wrong for layer in range(odd) if line.startswith(f"{layer}.")]


def test_of_the_command(tmp_path, capsys):
    """The example of two axes is certified; only a look-up is tested, not proven."""
    words = ["prove", "plan", "examples/two_axes.py:case", "--plan", "examples/two_axes.py:plan"]
    assert main([*words, "--mesh", "dp=4,tp=4", "--report", str(tmp_path / "certificate.json")]) == 0
    document = json.loads((tmp_path / "certificate.json").read_text())
    levels = [call["level"] for call in document["calls"]]
    assert (document["ok"], levels.count("proven") > 40) == (True, True)
    assert {call["op"] for call in document["calls"] if call["level"] != "proven"} <= {"embedding"}
    assert "rows of operators" in capsys.readouterr().out


def graph(size, **facts):
    """Return a graph of one elementwise step."""
    shape = (Size(size),)
    does = Primitive(((0,),), (0,), **facts)
    return Graph((Step("x", Input(), (), shape), Step("f", does, (0,), shape)), (0,), (1,))


def test_arguments_with_large_arrays_differ():
    """Arrays whose text NumPy shortens or rounds are different arguments."""
    zeros = np.zeros(2000)
    other, near = zeros.copy(), np.full(2000, 1e-12)
    other[1000] = 1.0
    texts = {complete_text(((each,), {"dim": 0})) for each in (zeros, other, near, near * (1 + 1e-10))}
    assert len(texts) == 4
    assert complete_text((zeros, 1)) == complete_text((np.zeros(2000), 1))


def test_graphs_of_one_device_and_of_a_rank():
    """Sizes that differ are multiples of one label; other numbers, other steps or other shares are refused."""
    both = paired(graph(12), graph(3))
    assert (both.steps[1].shape, both.hints) == ((Size(1, ("s",)),), {"s": 12})
    assert paired(graph(12), graph(12)).steps[0].shape == (Size(12),)
    with pytest.raises(UnprovenError, match=r"^f: the local call does something different from one device$"):
        paired(graph(12, numbers="[12]"), graph(3, numbers="[3]"))
    with pytest.raises(UnprovenError, match=r"^the local call takes different steps from one device$"):
        paired(graph(12), Graph(graph(3).steps[:1], (0,), (0,)))
    whole = graph(12)
    other = replace(whole, steps=(whole.steps[0], replace(whole.steps[1], shape=(Size(6),))))
    local = replace(whole, steps=(replace(whole.steps[0], shape=(Size(6),)), replace(whole.steps[1], shape=(Size(2),))))
    with pytest.raises(UnprovenError) as caught:
        paired(other, local)
    assert str(caught.value) == (
        "a rank has 2 of 6, 6 of 12 elements along dims of one call: these are different fractions"
    )
    flat = replace(whole, steps=(whole.steps[0], replace(whole.steps[1], shape=(ONE, ONE))))
    with pytest.raises(UnprovenError, match=r"^f: the local result has other dims$"):
        paired(flat, whole)


def test_unused_placements():
    """A row of an axis of one rank, or of whole operands alone, needs no proof."""
    certificate = certify(case, lambda _: ParallelPlan({}, batch={"dp": Shard(0)}), (1,), ("dp",))
    assert (certificate.calls, certificate.status) == ([], 3)
    assert certificate.text().endswith("\nINCONCLUSIVE: no operator was called with DTensors, so nothing is proven")
    assert certify(case, lambda _: ParallelPlan({}), (2,), ("tp",)).notes == ["axis tp: no operator has DTensors on it"]


def test_ranks_whose_parts_have_other_sizes():
    """A row is proven on every size of a part: the rest of a dim, and an empty part, have local calls of their own."""
    certificate = certify(case, plan_of(), (3,), ("tp",))  # 16 over 3 is 6, 6, 4
    assert certificate.ok
    assert {call.level for call in certificate.calls} == {"proven"}
    empty = certify(case, plan_of(), (12,), ("tp",))  # 16 over 12 is 2 for eight ranks, and nothing for four
    reasons = {call.why for call in empty.calls if call.level != "proven"}
    assert all(reason.startswith("rank 8 of the axis: ") for reason in reasons)


@pytest.mark.parametrize("sizes, ranks", [((8,), 4), ((7,), 4), ((5,), 4), ((16, 5), 6), ((0,), 2), ((9, 14), 8)])
def test_one_rank_for_each_size_of_a_part(sizes, ranks):
    """Between the ranks that are tried, every other one has the local sizes of one of them."""
    from types import SimpleNamespace

    from hyper_parallel.core.dtensor.layout import chunk_bounds
    from hyper_parallel.core.shard.rule import Row
    from hyper_parallel.verify.prove.plan import _representative_ranks

    row = Row(tuple(Shard(0) for _ in sizes), (Shard(0),))
    found = _representative_ranks(row, [SimpleNamespace(shape=(size,)) for size in sizes], ranks)

    def parts(rank):
        return tuple(stop - start for start, stop in (chunk_bounds(size, ranks, rank) for size in sizes))

    assert len(found) <= 2 + 2 * len(sizes)
    assert {parts(rank) for rank in range(ranks)} == {parts(rank) for rank in found}


def test_clipping_and_optimizers():
    """The norm is that of all ranks, and each weight is written as one device writes it."""
    for optimizer, clip in (("sgd", None), ("adamw", 1.0)):
        found = certify(lambda o=optimizer, c=clip: replace(case(), optimizer=o, clip=c), plan_of(), (2,), ("tp",))
        assert (found.ok, found.open, found.updates) == (True, [], 4)
        assert "proven for these sizes: the optimizer's step of 4 parameters" in found.text()


def sharded_twice(model, mesh):
    """Apply tensor parallelism, and fully_shard over the data axis of the mesh."""
    from hyper_parallel import fully_shard, parallelize_module

    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def test_fully_sharded_parameters():
    """Parameters are gathered over the data axis, and gradients averaged over it; nothing is left uncovered."""
    found = certify(lambda: replace(case(), optimizer="adamw", clip=1.0), lambda _: sharded_twice, (3, 2), ("dp", "tp"))
    assert (found.ok, found.open, found.updates) == (True, [], 4), found.text()
    assert found.changes["ReduceScatter of fully_shard for every size"] == 4


def test_equal_layers_share_plans_and_traces(monkeypatch):
    """The numbers of plans, traces, checked steps and searches for a tensor's owner do not grow with equal layers."""
    import torch

    from hyper_parallel import fully_shard, parallelize_module
    from hyper_parallel.core.shard.op_plan import observing_plans
    from hyper_parallel.verify.frameworks.torch.harness import TorchHarness
    from hyper_parallel.verify.prove import data_axes

    done = Counter()

    def counted(owner, name):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            done[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(TorchHarness, "primitives")
    counted(TorchHarness, "buffers")
    counted(data_axes, "check_steps")

    def work(layers):
        def build():
            pairs = ((torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(layers))
            return torch.nn.Sequential(*(torch.nn.Sequential(*each) for each in pairs))

        def parallel(model, mesh):
            parallelize_module(model, mesh["tp"], {"*.0": ColwiseParallel(), "*.2": RowwiseParallel()})
            for layer in model:
                fully_shard(layer, mesh=mesh["dp"])
            return fully_shard(model, mesh=mesh["dp"])

        def case():
            batch = (torch.ones(4, 8), torch.ones(4, 8))
            return ModelCase(build, [batch], lambda out, _: (out**2).sum(), optimizer="adamw", clip=1.0)

        done.clear()
        with observing_plans(lambda _: done.update(["plan"])):
            found = certify(case, lambda _: parallel, (2, 2), ("dp", "tp"))
        assert (found.ok, found.open, found.updates) == (True, [], 4 * layers), found.text()
        return dict(done), found.plain

    (few, calls), (many, more) = work(2), work(5)
    assert few == many
    assert 0 < calls < more


def test_what_no_proof_covers():
    """Collectives of other code than changes of placement, and weights that nothing followed writes, are listed."""
    import torch

    from hyper_parallel.platform.select import current_platform

    def reducing(model, mesh):
        def reduce(_, __, out):
            return current_platform().transport().all_reduce(out, "sum", mesh.ranks_along((0,)))

        model[1].register_forward_hook(reduce)

    found = certify(case, lambda _: reducing, (2,), ("dp",))
    assert "(model): all_reduce over dp, which no change of placement runs" in found.open

    class Frozen(torch.optim.SGD):
        """Writes nothing."""

        def step(self):
            """Do nothing."""

    lazy = certify(lambda: replace(case(), optimizer=lambda p: Frozen(p, lr=0.1)), plan_of(), (2,), ("tp",))
    line = "gradient clipping and the optimizer's step: on tp nothing that is followed writes 0.weight"
    assert (lazy.status, lazy.wrong, lazy.open[0], lazy.updates) == (3, [], line, 0)


def test_parts_that_are_uneven_or_empty():
    """A weight of which the last rank has nothing is proven; a row that uneven parts leave to tests says so."""

    def build():
        import torch

        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Linear(16, 5))

    def spec():
        import torch

        return ModelCase(build, [(torch.ones(6, 12), torch.ones(6, 5))], lambda out, _: (out**2).mean())

    found = certify(spec, lambda _: only_sharded, (4,), ("dp",))
    assert {call.level for call in found.calls} == {"proven"}, found.text()
    found = certify(spec, lambda _: ParallelPlan({}, batch={"dp": Shard(0)}), (4,), ("dp",))
    uneven = "6 elements do not divide by 4 ranks, and this one has 2 of them"
    assert {call.why for call in found.calls if call.level != "proven"} == {
        f"the local call takes different steps from one device: {uneven}"
    }
    assert (found.open, found.status) == ([], 0), found.text()
    assert found.notes == [
        "gradient clipping and the optimizer's step: it is computed on DTensors, and rows of mean rest on tests"
    ]


def only_sharded(model, mesh):
    """Apply fully_shard over the whole mesh."""
    from hyper_parallel import fully_shard

    return fully_shard(model, mesh=mesh)


def also_distributed(model, mesh):
    """Apply distribute_module as well, which a plan with a batch does itself."""
    from hyper_parallel import distribute_module

    return distribute_module(only_sharded(model, mesh), mesh)


def test_advice_for_a_sharded_model():
    """A batch of DTensors does not fit what fully_shard gathers: the advice is to leave it out, and works."""
    advice = (
        "the model under PLAN: fully_shard gathers plain parameters, but batch= of ParallelPlan makes the arrays of "
        "the batch DTensors; leave out batch=, and they stay plain"
    )
    for parallelize in (only_sharded, also_distributed):
        with pytest.raises(InputError) as error:
            certify(case, lambda _, run=parallelize: ParallelPlan(run, batch={}), (2,), ("dp",))
        assert str(error.value).splitlines()[0] == advice
        assert certify(case, lambda _, run=parallelize: ParallelPlan(run), (2,), ("dp",)).ok


@pytest.mark.parametrize(
    "read, problem",
    [
        (lambda x: x[x > 0], "the size of the result of nonzero (indexing by a mask calls it)"),
        (lambda x: x.unique(), "the size of the result of unique"),
        (lambda x: x * x.sum().item(), "the result of item"),
    ],
)
def test_results_that_depend_on_values(read, problem):
    """A function that reads values cannot run without them; the message says which, and what to do."""
    import torch

    class Reader(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(12, 16)

        def forward(self, x):
            return read(self.first(x))

    def spec():
        return ModelCase(Reader, [(torch.ones(8, 12), torch.ones(8, 5))], lambda out, _: (out**2).sum())

    with pytest.raises(InputError) as error:
        certify(spec, lambda _: ParallelPlan({"first": ColwiseParallel()}), (2,), ("tp",))
    assert str(error.value).splitlines()[0] == (
        f"SPEC: the model under PLAN: {problem} depends on values, and here the model runs without values; use a "
        "function whose result has a known size, such as torch.where(mask, x, 0) for x[mask], or verify model, which "
        "runs on values"
    )
