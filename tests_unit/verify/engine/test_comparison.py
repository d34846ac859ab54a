"""The comparison end to end, on a small program in NumPy with one fault at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hyper_parallel.verify.engine.comparison import compare_runs
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 3}, {"dp": 3, "tp": 2}, {"dp": 1, "tp": 4}, {"dp": 3, "tp": 1}])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_correct_program_is_equal(runs, mesh, clip):
    """Uneven shards, local batches, pending sums, local losses and clipping raise no alarm; everything is compared."""
    verdict = compare_runs(*runs(mesh=mesh, clip=clip))
    assert verdict.equal, verdict.text()
    world = mesh["dp"] * mesh["tp"]
    assert verdict.counts["gradient"] == verdict.counts["state"] == 4 * 3 * world
    assert verdict.counts["weight"] == 4 * 4 * world
    assert verdict.counts["output"] == 4 * 3 * world
    assert not verdict.unplaced
    assert verdict.first is None
    assert verdict.headline().startswith(f"equal on {world} ranks: 16 weights" if world == 1 else f"equal on {world}")


def no_reduction(place, axis=None):
    """Return a fault that leaves out a reduction, or runs it over another axis."""

    def change(at, _step, values):
        if at == f"reduce {place}":
            values["axis"] = axis

    return change


def scaled(place, factor):
    """Return a fault that multiplies the recorded values of some names."""

    def change(at, _step, values):
        if at.startswith(place):
            for rank in values:
                values[rank] = values[rank] * factor

    return change


def at(place, function, ranks=None, steps=(0, 1, 2)):
    """Return a fault that changes the values of a place on some ranks."""

    def change(where, step, values):
        if where == place and step in steps:
            for rank in ranks if ranks is not None else list(values):
                values[rank] = function(values[rank])

    return change


@pytest.mark.parametrize(
    "change, clip, kind, name, cause, axis",
    [
        (no_reduction("input gradient"), 0, "gradient", "scale.weight", "missing-reduction", "tp"),
        (no_reduction("up.weight"), 0, "gradient", "up.weight", "missing-reduction", "dp"),
        (no_reduction("down.bias", "tp"), 0, "gradient", "down.bias", "wrong-axis", "tp"),
        (no_reduction("output"), 0, "output", "down", "missing-reduction", "tp"),
        (scaled("gradient", 0.5), 0, "gradient", "down.weight", "average-for-sum", "dp"),
        (scaled("gradient scale.weight", 3.0), 0, "gradient", "scale.weight", "repeated-reduction", "tp"),
        (scaled("gradient down.bias", 9.0), 0, "gradient", "down.bias", "scaled-by-size", "tp x tp"),
        (scaled("gradient down.bias", 5 / 7), 0, "gradient", "down.bias", "scaled-by-count", ""),
        (at("gradient down.bias", lambda _: None, (4,)), 0, "gradient", "down.bias", "no-gradient", ""),
        (at("output up", lambda h: h[::-1].copy()), 0, "output", "up", "permuted", ""),
        (at("output down", lambda h: h + h.mean(), (1,)), 0, "output", "down", "replicas-differ", ""),
        (at("weight down.bias", lambda w: w + 1, (5,), (2,)), 0, "weight", "down.bias", "replicas-differ", ""),
        (no_reduction("norm"), 0.5, "norm", "gradient norm", "norm-local", ""),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_cause(runs, change, clip, kind, name, cause, axis):
    """The first wrong value, and the class of the error, come from the numbers."""
    verdict = compare_runs(*runs(change, clip=clip))
    first = verdict.first
    assert first is not None
    assert (first.kind, first.name, first.cause.kind, first.cause.axis) == (kind, name, cause, axis), verdict.text()
    assert first.cause.evidence
    assert not verdict.equal
    assert first.step == (2 if cause == "replicas-differ" and kind == "weight" else 0)


def test_a_loss_of_right_gradients_is_the_ranks_own(runs):
    """A loss that differs though all gradients are equal is listed; with wrong gradients its factor is named."""
    verdict = compare_runs(*runs(scaled("loss", 7.0)))
    assert verdict.equal
    assert verdict.skipped == [
        "the loss: they differ, but all gradients, norms, optimizer states and weights are equal"
    ]

    def change(where, step, values):
        scaled("loss", 4.0)(where, step, values)
        scaled("gradient", 2.0)(where, step, values)

    verdict = compare_runs(*runs(change))
    assert (verdict.first.kind, verdict.first.cause.kind, verdict.first.cause.axis) == ("loss", "scaled-by-size", "dp")


def test_a_norm_that_counts_replicas_is_named(runs):
    """The norm over every rank's part, replicated parameters included, is recognised; it precedes clipped gradients."""

    def change(where, _step, values):
        if where == "norm":
            total = np.sqrt(sum(values["squares"][r] + values["once"][r] for r in range(3)))
            values["norms"].update(dict.fromkeys(values["norms"], total))

    verdict = compare_runs(*runs(change, clip=0.5))
    assert (verdict.first.kind, verdict.first.cause.kind) == ("norm", "norm-counted-twice"), verdict.text()
    assert "over tp of every rank's part, replicas included" in verdict.first.cause.evidence


def test_a_weight_that_stays_is_not_updated(runs):
    """A weight that is bit for bit that before the step was not updated, though its gradient is right."""

    def change(where, _step, values):
        if where == "update up.weight":
            values["after"].update(values["before"])

    verdict = compare_runs(*runs(change))
    assert (verdict.first.kind, verdict.first.name) == ("weight", "up.weight")
    assert verdict.first.cause.kind == "not-updated"


def test_a_gradient_that_was_kept_is_stale(runs):
    """A gradient to which that of the step before was added, as without zero_grad, is stale; so is the earlier one."""
    kept = {}

    def change(where, _step, values, *, add):
        if where == "gradient down.bias":
            old = dict(kept)
            kept.update({rank: value.copy() for rank, value in values.items()})
            if old:
                values.update({rank: old[rank] + (values[rank] if add else 0) for rank in values})

    for add in (True, False):
        kept.clear()
        verdict = compare_runs(*runs(lambda *args, add=add: change(*args, add=add)))
        assert (verdict.first.name, verdict.first.step, verdict.first.cause.kind) == ("down.bias", 1, "stale")


def test_only_some_components(runs):
    """A gradient with some wrong elements says how many; one that is partly scaled says by what."""

    def half(gradient):
        changed = gradient.copy()
        changed[:2] *= -1.7
        return changed

    verdict = compare_runs(*runs(at("gradient down.bias", half)))
    assert verdict.first.cause.kind == "components"
    assert "(in 12 of 18 elements); the other elements are equal" in verdict.first.cause.evidence

    def crooked(gradient):
        changed = gradient.copy()
        changed.flat[0] += 1e-9 * abs(changed.flat[0])
        return changed

    verdict = compare_runs(*runs(at("gradient up.weight", crooked, (0, 3), (0,))))
    assert (verdict.first.name, verdict.first.cause.kind) == ("up.weight", "components")
    assert verdict.first.ranks == (0, 3)


def test_shards_of_another_rank(runs):
    """Weights of another rank's part differ before training, and the missing part is named."""

    def change(where, step, values):
        if where == "weight up.weight" and step == -1:
            values[1] = values[1] * 0 + values[2][:2].mean()

    reference, repeats, parallel = runs(change)
    verdict = compare_runs(reference, repeats, parallel)
    assert (verdict.first.kind, verdict.first.name, verdict.first.step) == ("weight", "up.weight", -1)
    assert "is not a part of the single device's [7, 4]" in verdict.first.why

    def swapped(where, step, values):
        if where == "weight up.weight" and step == -1:
            values[2] = values[1].copy()
            values[5] = values[1].copy()

    verdict = compare_runs(*runs(swapped))
    assert (verdict.first.name, verdict.first.cause.kind) == ("up.weight", "permuted")
    assert "are on no rank" in verdict.first.cause.evidence


def test_nothing_compared_is_no_success(runs):
    """A parallel run without records, or that stops early, is not equal."""
    reference, repeats, _ = runs()
    verdict = compare_runs(reference, repeats, Run([RankRecords(0), RankRecords(1)]))
    assert not verdict.equal
    assert verdict.headline() == "NOT VERIFIED: nothing was compared"
    assert "rank 0 makes no optimizer step, the reference makes 3" in verdict.incomplete
    assert "no rank has a parameter called up.weight" in verdict.incomplete


def test_a_program_that_stops_is_not_verified(runs):
    """A rank that makes fewer steps than the reference is named."""
    reference, repeats, parallel = runs()
    for rank in parallel.ranks:
        rank.records = [record for record in rank.records if record.step < 2]
    verdict = compare_runs(reference, repeats, parallel)
    assert not verdict.equal
    assert verdict.headline() == "NOT VERIFIED: rank 0 stops after step 2, the reference makes 3"


def test_values_of_one_run_only_are_listed(runs):
    """A value that only one of the runs has is listed as not compared; a mask that only ranks draw differs."""
    reference, repeats, parallel = runs()
    for rank in parallel.ranks:
        rank.records.insert(6, Record("output", "extra", "extra", 0, 0, np.ones(3)))
    reference.ranks[0].records.append(Record("output", "gone", "gone", 0, 0, np.ones(3)))
    verdict = compare_runs(reference, repeats, parallel)
    assert verdict.equal
    assert "the output of extra: missing in the reference" in verdict.skipped
    assert "the output of gone: missing on all ranks in some step" in verdict.skipped
    parallel.ranks[1].records.insert(6, Record("mask", "scale", "scale", 0, 0, np.ones(3, bool)))
    verdict = compare_runs(reference, repeats, parallel)
    assert (verdict.first.kind, verdict.first.cause.kind) == ("mask", "random-differs")


def test_names_of_stages_are_mapped():
    """A stage that counts its own layers is compared under the reference's names, and that is said."""
    rng = np.random.default_rng(0)
    weights = {f"layers.{n}.weight": rng.standard_normal((3, 2)) for n in range(4)}
    whole = [Record("weight", name, name[:8], -1, 0, value) for name, value in weights.items()]
    stages = []
    for rank in range(2):
        own = [dataclasses.replace(record, name=f"layers.{n}.weight", module=f"layers.{n}")
               for n, record in enumerate(whole[2 * rank : 2 * rank + 2])]  # fmt: skip
        stages.append(RankRecords(rank, own))
    reference = Run([RankRecords(0, whole)])
    verdict = compare_runs(reference, [reference, reference], Run(stages))
    assert verdict.equal, verdict.text()
    assert "layers.0 on rank 1 is compared with the reference's layers.2" in verdict.notes


def test_a_stage_with_a_tied_weight_and_outputs_of_several_tensors():
    """A stage's outputs have the reference's names; a module that has no weight of its own keeps its name."""
    rng = np.random.default_rng(1)
    weights = {name: rng.standard_normal((3, 2)) for name in ("embed.weight", "layers.0.weight", "layers.1.weight")}
    outs = {name: rng.standard_normal((5, 3)) for name in ("embed", "layers.0[0]", "layers.1[0]", "head[0]")}

    def stage(rank, names, calls):
        owned = [Record("weight", own, own.rpartition(".")[0], -1, 0, weights[name]) for own, name in names.items()]
        states = [Record("state", f"{own}:step", own.rpartition(".")[0], 0, 0, weights[name])
                  for own, name in names.items()]  # fmt: skip
        called = [Record("output", own, own.partition("[")[0], 0, 0, outs[name]) for own, name in calls.items()]
        return RankRecords(rank, [*owned, *called, *states])

    def run():
        whole = Run([stage(0, {name: name for name in weights}, {name: name for name in outs})])
        first = stage(0, {name: name for name in ("embed.weight", "layers.0.weight")}, {"embed": "embed"})
        first.records.append(Record("output", "layers.0[0]", "layers.0", 0, 0, outs["layers.0[0]"]))
        last = stage(
            1,
            {"layers.0.weight": "layers.1.weight", "head.weight": "embed.weight"},
            {"layers.0[0]": "layers.1[0]", "head[0]": "head[0]"},
        )
        return compare_runs(whole, [whole, whole], Run([first, last]))

    verdict = run()
    assert verdict.equal, verdict.text()
    assert dict(verdict.counts) == {"weight": 4, "output": 4, "state": 4}
    assert verdict.skipped == []
    assert verdict.notes == [
        "layers.0 on rank 1 is compared with the reference's layers.1",
        "head.weight on rank 1 is compared with the reference's embed.weight",
    ]


def test_interleaved_chunks_that_are_named_by_the_order_of_their_calls():
    """A rank's first chunk is found by its weights, though its norm has the same constants as the reference's first."""
    rng = np.random.default_rng(1)
    roots = ("", "Chain.", "Chain#2.", "Chain#3.")
    weights = [rng.standard_normal((3, 2)) for _ in roots]

    def records(chunks):
        own = zip(roots, chunks, strict=False)
        values = [(root, value) for root, chunk in own for value in (("norm", np.ones(3)), ("fc", weights[chunk]))]
        return [
            Record("weight", f"{root}{name}.weight", f"{root}{name}", -1, 0, value) for root, (name, value) in values
        ]

    whole = Run([RankRecords(0, records(range(4)))])
    stages = Run([RankRecords(rank, records([rank, rank + 2])) for rank in range(2)])
    verdict = compare_runs(whole, [whole, whole], stages)
    assert verdict.equal, verdict.text()
    assert dict(verdict.counts) == {"weight": 8}
    assert sorted(verdict.notes) == [
        "Chain on rank 0 is compared with the reference's Chain#2",
        "Chain on rank 1 is compared with the reference's Chain#3",
        "the model on rank 1 is compared with the reference's Chain",
    ]


def test_parts_of_a_model_that_a_rank_calls_by_themselves():
    """A rank that calls a part of the model has its values under the part's own names; a tied weight keeps its name."""
    rng = np.random.default_rng(0)
    names = ("embed.weight", "first.a.weight", "last.b.weight")
    values = {name: rng.standard_normal((3, 2)) for name in names}
    outputs = {name: rng.standard_normal((5, 3)) for name in ("first", "last.b", "last", "last (no_grad)")}

    def run(*ranks):
        records = [
            [
                *(Record("weight", own, own.rpartition(".")[0], -1, 0, values[name]) for name, own in weights.items()),
                *(Record("output", own, own.partition(" ")[0], 0, 0, outputs[name]) for name, own in outs.items()),
                Record("rate", "optimizer 0, group 0", "", 0, 0, np.array(0.1)),
            ]
            for weights, outs in ranks
        ]
        return Run([RankRecords(rank, own) for rank, own in enumerate(records)])

    whole = run(({name: name for name in names}, {name: name for name in outputs}))
    first = ({"embed.weight": "embed.weight", "first.a.weight": "a.weight"}, {"first": "(model)"})
    last = (
        {"embed.weight": "embed.weight", "last.b.weight": "b.weight"},
        {"last.b": "b", "last": "(model)", "last (no_grad)": "(model) (no_grad)"},
    )
    stages = run(first, last)
    verdict = compare_runs(whole, [whole, whole], stages)
    assert verdict.equal, verdict.text()
    assert dict(verdict.counts) == {"weight": 4, "output": 4, "rate": 2}
    assert verdict.skipped == []
    assert verdict.notes == [
        "the model on rank 0 is compared with the reference's first",
        "the model on rank 1 is compared with the reference's last",
    ]
    outputs["last.b"] = outputs["last.b"] + 1
    verdict = compare_runs(whole, [whole, whole], run(first, last))
    assert (verdict.first.name, verdict.first.ranks) == ("last.b", (1,))


@pytest.mark.parametrize("zeros", [False, True], ids=["padded", "both padded"])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (6, 6), (3, 3, 3, 3)])
def test_rows_that_pad_a_parameter_are_not_compared(sizes, zeros):
    """A vocabulary padded to a multiple of the ranks: the reference's rows are compared, in outputs as well.

    The single device may pad it, too, with fewer rows of zeros.
    """
    rng = np.random.default_rng(sum(sizes) + len(sizes))
    total, batch = 10, 7
    weight, gradient = rng.standard_normal((2, total, 2))
    weight[total - zeros :] = 0.0
    pad = sum(sizes) - total

    def run(parts, scale=1.0):
        ranks, start = [], 0
        for rank, size in enumerate(parts):
            extra = sum(parts) - total
            own = [np.concatenate([a, np.zeros((extra, 2)) + b])[start : start + size] for a, b in
                   ((weight, 0.0 if zeros else 0.25), (gradient * scale, 0.0))]  # fmt: skip
            logits = np.concatenate([output, np.full((batch, extra), -np.inf)], 1)[:, start : start + size]
            ranks.append(RankRecords(rank, [
                Record("weight", "head.weight", "head", -1, 0, own[0]),
                Record("output", "head", "head", 0, 0, logits),
                Record("gradient", "head.weight", "head", 0, 0, own[1]),
                Record("state", "head.weight:momentum", "head", 0, 0, own[1]),
            ]))  # fmt: skip
            start += size
        return Run(ranks)

    output = rng.standard_normal((batch, total))
    reference = run([total])
    mesh = {"tp": len(sizes)}
    verdict = compare_runs(reference, [reference, reference], run(sizes), mesh=mesh)
    assert verdict.equal, verdict.text()
    assert verdict.unplaced == []
    assert verdict.checked == 3 * 2 * total + batch * total
    last = len(sizes) - 1
    where = f"{pad} on rank {last}"
    assert verdict.skipped == [
        f"the last rows of dim 0 of head.weight, {where}: the single device has 10 rows, the ranks 12"
    ]
    verdict = compare_runs(reference, [reference, reference], run(sizes, 1.5), mesh=mesh)
    assert (verdict.first.kind, verdict.first.name) == ("gradient", "head.weight")


_RIGHT_OUTPUTS = "every output before it equals the reference's"
_PADDED = (
    f"{_RIGHT_OUTPUTS}, and rows that the single device lacks have gradients: the last rows of dim 0 of head.weight, "
    "2 on rank 1: the single device has 10 rows, the ranks 12"
)


@pytest.mark.parametrize(
    "slope, off, kind, evidence",
    [
        (0.5, 0.031, "padding", _PADDED),
        (0.0, np.log(2), "loss", f"{_RIGHT_OUTPUTS}; it is the reference's plus log 2, the size of tp"),
        (0.0, 0.031, "loss", f"{_RIGHT_OUTPUTS}, and no size, count or logarithm of a size explains the loss"),
    ],
)
def test_a_loss_after_right_outputs(slope, off, kind, evidence):
    """A wrong loss after right outputs: rows of padding that have gradients, a logarithm of a size, or no more."""
    rng = np.random.default_rng(2)
    weight, gradient, output = rng.standard_normal((3, 12, 2))
    loss = 3.3**0.5

    def rank(rows, number, scale=1.3):
        own = gradient * scale
        own[10:] = slope
        return [
            Record("weight", "head.weight", "head", -1, 0, weight[rows]),
            Record("output", "head", "head", 0, 0, output),
            Record("loss", "loss", "", 0, 0, np.array(number)),
            Record("gradient", "head.weight", "head", 0, 0, own[rows]),
        ]

    reference = Run([RankRecords(0, rank(slice(10), loss, 1.0))])
    parallel = Run([RankRecords(n, rank(rows, loss + off)) for n, rows in enumerate((slice(6), slice(6, 12)))])
    first = compare_runs(reference, [reference, reference], parallel, mesh={"tp": 2}).first
    assert (first.kind, first.cause.kind, first.cause.evidence) == ("loss", kind, evidence)


def test_losses_of_other_calls_are_compared_as_a_union():
    """Ranks that cut their own part into micro-batches have other losses, whose sum over a step is the reference's."""
    rng = np.random.default_rng(4)
    weight, rows = rng.standard_normal((3, 2)), rng.standard_normal((12, 3))
    errors, gradient = rng.standard_normal(12) ** 2, rng.standard_normal((3, 2))

    def rank(parts, scale=1.0):
        records = [Record("weight", "w", "", -1, 0, weight)]
        for call, part in enumerate(parts):
            records.append(Record("output", "out", "out", 0, call, rows[part]))
            records.append(Record("loss", "loss", "", 0, call, np.array(errors[part].mean() / 2 * scale)))
        return [*records, Record("gradient", "w", "", 0, 0, gradient * 1.5)]

    single = rank([slice(0, 6), slice(6, 12)])
    single[-1] = dataclasses.replace(single[-1], value=gradient)
    reference = Run([RankRecords(0, single)])
    cuts = [[slice(0, 3), slice(3, 6)], [slice(6, 9), slice(9, 12)]]
    verdict = compare_runs(
        reference, [reference, reference], Run([RankRecords(n, rank(c)) for n, c in enumerate(cuts)])
    )
    assert verdict.first.kind == "gradient", verdict.text()
    wrong = Run([RankRecords(n, rank(c, 1.25)) for n, c in enumerate(cuts)])
    assert compare_runs(reference, [reference, reference], wrong).first.kind == "loss"


@pytest.mark.parametrize("world, mesh", [(2, {"dp": 2}), (3, {"dp": 3}), (4, {"dp": 2, "tp": 2})])
@pytest.mark.parametrize("fault", ["", "lost", "fraction", "trained"])
def test_counters_of_each_rank_s_own_rows_add_up(world, mesh, fault):
    """A counter is right if the ranks' counts add up exactly; a lost count, a fraction or a trained weight differs."""
    rng = np.random.default_rng(7)
    parts = [rng.integers(0, 9, (2, 5)) for _ in range(mesh["dp"])]
    start, weight, gradient = np.arange(5.0), rng.standard_normal((3, 2)), rng.standard_normal((3, 2))

    def rank(counted):
        total = start + np.cumsum(np.vstack([np.zeros((1, 5)), counted]), axis=0)
        records = [Record("weight", "w", "", -1, 0, weight)]
        records += [Record("weight", "count", "", step, 0, total[step + 1]) for step in (-1, 0, 1)]
        records += [Record("gradient", "count" if fault == "trained" else "w", "", 0, 0, gradient.flat[:5])]
        return records

    scale = 1.5 if fault == "fraction" else 1.0
    reference = Run([RankRecords(0, rank(scale * sum(parts)))])
    ranks = [RankRecords(n, rank(scale * parts[n * mesh["dp"] // world])) for n in range(world)]
    if fault == "lost":
        last = ranks[1].records
        last[3] = dataclasses.replace(last[3], value=last[3].value - np.eye(5)[2])
    verdict = compare_runs(reference, [reference, reference], Run(ranks), mesh=mesh)
    if fault:
        assert (verdict.first.kind, verdict.first.name) == ("weight", "count"), verdict.text()
    else:
        assert not verdict.differences, verdict.text()
        assert not verdict.replicas
        assert verdict.notes == ["parameter count: each rank counts its own rows; over dp the counts add up"]


def test_a_stage_that_loads_another_layer_differs():
    """The same names with the weights of other layers are no mapping: a layer is held by nobody."""
    rng = np.random.default_rng(0)
    whole = [
        Record("weight", f"layers.{n}.weight", f"layers.{n}", -1, 0, rng.standard_normal((3, 2))) for n in range(3)
    ]
    wrong = dataclasses.replace(whole[2], value=whole[0].value)
    reference = Run([RankRecords(0, whole)])
    verdict = compare_runs(reference, [reference], Run([RankRecords(0, whole[:2]), RankRecords(1, [wrong])]))
    assert (verdict.first.name, verdict.first.ranks, verdict.first.cause.kind) == ("layers.2.weight", (1,), "permuted")
    assert "rank 1 has the single device's layers.0.weight" in verdict.first.cause.evidence


@pytest.mark.parametrize("shape", [(2, 3), ()], ids=["tensor", "number"])
def test_a_stages_output_of_the_model_is_not_the_models(shape):
    """A stage's own output of the whole model is left out where another stage has the right one, and is wrong else.

    So it is where the whole model's output is a single number, as where its last layer is the loss.
    """
    rng = np.random.default_rng(0)
    layers = [Record("weight", f"layers.{n}.weight", f"layers.{n}", -1, 0, rng.standard_normal((3, 3))) for n in (0, 1)]
    first, last = (Record("output", "", "", 0, 0, np.asarray(rng.standard_normal(each))) for each in ((2, 3), shape))
    reference = Run([RankRecords(0, [*layers, last])])
    stages = Run([RankRecords(0, [layers[0], first]), RankRecords(1, [layers[1], last])])
    verdict = compare_runs(reference, [reference], stages)
    assert verdict.equal, verdict.text()
    assert verdict.counts["output"] == 1
    assert verdict.skipped == [
        "the model's output on rank 0: they have only some of its parameters, as pipeline stages do"
    ]
    nobody = Run([RankRecords(0, [layers[0], first]), RankRecords(1, [layers[1], first])])
    assert compare_runs(reference, [reference], nobody).first.kind == "output"
    whole = Run([RankRecords(0, [*layers, first]), RankRecords(1, [*layers, last])])
    assert compare_runs(reference, [reference], whole).first.ranks == (0,)


def test_a_module_that_is_called_late_is_not_a_stages():
    """A shadow model that is called after the first step has no weights before training: its wrong output differs."""
    weight = np.random.default_rng(0).standard_normal((3, 3))

    def rank(factor):
        shadow = [Record("output", "ema", "ema", 1, 0, factor * weight[0])]
        return [*shadow, Record("weight", "ema.weight", "ema", 1, 0, factor * weight)]

    reference = Run([RankRecords(0, rank(1.0))])
    verdict = compare_runs(reference, [reference], Run([RankRecords(0, rank(1.0)), RankRecords(1, rank(1.5))]))
    assert (verdict.first.kind, verdict.first.name, verdict.first.ranks) == ("output", "ema", (1,)), verdict.text()
    assert verdict.skipped == []


def test_gradients_that_each_rank_clips_by_its_own_norm():
    """A program that clips by itself records no norm; a factor per rank that is its share of the norm shows it."""
    rng = np.random.default_rng(0)
    weight, gradient = rng.standard_normal((2, 7))
    own = [weight[:4], weight[4:]]
    parts = [gradient[:4], gradient[4:]]
    norms = [np.linalg.norm(part) / np.linalg.norm(gradient) for part in parts]

    def run(weights, gradients):
        kinds = (("weight", -1, weights), ("gradient", 0, gradients))
        records = [
            [Record(kind, "up.weight", "up", step, 0, values[rank]) for kind, step, values in kinds]
            for rank in range(len(weights))
        ]
        return Run([RankRecords(rank, own_records) for rank, own_records in enumerate(records)])

    reference = run([weight], [gradient])
    clipped = run(own, [part / norm for part, norm in zip(parts, norms, strict=True)])
    verdict = compare_runs(reference, [reference], clipped)
    assert verdict.first.cause.kind == "norm-local"
    assert "the 2-norm of all gradients, divided by that of the rank's part" in verdict.first.cause.evidence
    small = np.concatenate([gradient[:4], gradient[4:] / 50])
    factors = np.linalg.norm(small) / np.linalg.norm(small[:4]), 1.7  # the reference's limit is 1 / 1.7 of its norm
    some = run(own, [small[:4] * factors[0], small[4:] * factors[1]])
    cause = compare_runs(run([weight], [small]), [run([weight], [small])], some).first.cause
    assert cause.kind == "norm-local"
    assert cause.evidence.endswith("divided by that of the rank's part; rank 1, below the limit, does not clip")
    other = run(own, [part * (rank + 2.5) for rank, part in enumerate(parts)])
    assert compare_runs(reference, [reference], other).first.cause.kind == "scaled-by-count"


def test_shards_of_a_flat_parameter_clipped_by_their_own_norm():
    """A flat parameter of the optimizer has the norm of all; its parts by their own names are not counted again."""
    rng = np.random.default_rng(3)
    weight, gradient = rng.standard_normal((2, 9))

    def run(*parts):
        whole = len(parts) == 1
        ranks = [
            [
                Record("weight", "flat", "", -1, 0, weight[part]),
                Record("weight", "a.w", "a", -1, 0, weight.reshape(3, 3)),
                Record(
                    "gradient", "flat", "", 0, 0,
                    gradient[part] * (1 if whole else np.linalg.norm(gradient) / np.linalg.norm(gradient[part])),
                ),
                Record("gradient", "a.w", "a", 0, 0, gradient.reshape(3, 3)),
            ]
            for part in parts
        ]  # fmt: skip
        return Run([RankRecords(rank, records) for rank, records in enumerate(ranks)])

    reference = run(slice(None))
    first = compare_runs(reference, [reference], run(slice(0, 5), slice(5, 9))).first
    assert (first.name, first.cause.kind) == ("flat", "norm-local")


def test_a_bias_of_the_module_around_is_added_by_every_rank():
    """The output of a sum inside a linear shows the linear's own bias added on each rank."""
    rng = np.random.default_rng(0)
    bias, output = rng.standard_normal(3), rng.standard_normal((4, 3))
    before = Record("weight", "down.bias", "down", -1, 0, bias)

    def run(world, value):
        records = [before, Record("output", "down.sum", "down.sum", 0, 0, value)]
        return Run([RankRecords(rank, records) for rank in range(world)])

    reference = run(1, output + bias)
    cause = compare_runs(reference, [reference], run(3, output + 3 * bias), mesh={"tp": 3}).first.cause
    assert (cause.kind, cause.axis) == ("repeated-reduction", "tp")


def test_a_small_bias_that_every_rank_adds_is_found_in_the_whole():
    """A bias that moves each element by less than it is allowed to is wrong as a whole, also as a union of calls."""
    rng = np.random.default_rng(0)
    output, bias = rng.standard_normal((400, 6)), 0.012 * np.array([1, -1, 1, 1, -1, 1])
    noise = rng.standard_normal((400, 6))
    before = Record("weight", "down.bias", "down", -1, 0, bias)

    def run(world, value):
        records = [before, Record("output", "down", "down", 0, 0, value)]
        return Run([RankRecords(rank, records) for rank in range(world)])

    repeats = [run(1, output + 0.003 * sign * noise) for sign in (1, -1)]
    first = compare_runs(run(1, output), repeats, run(3, output + 2 * bias), mesh={"tp": 3}).first
    assert (first.kind, first.name, first.cause.kind) == ("output", "down", "repeated-reduction")
    assert first.cause.evidence == (
        "minus 2 times down.bias it is ten times nearer to the reference as a whole: each of the 3 ranks of tp adds it"
    )


@pytest.mark.parametrize("factor, equal", [(1.0, True), (1.2, False)])
def test_parts_of_a_clipped_gradient_move_more_than_the_whole(factor, equal):
    """Clipping holds the whole along itself, not its halves: they may move as they do before it, and no further."""
    rng = np.random.default_rng(0)
    weight, gradient = rng.standard_normal((2, 40))
    noise = 1e-3 * rng.standard_normal(40)

    def run(*gradients):
        halves = [slice(None)] if len(gradients) == 1 else [slice(0, 20), slice(20, 40)]
        ranks = [
            [
                Record("weight", "a.w", "a", -1, 0, weight[half]),
                Record("gradient", "a.w", "a", 0, 0, own[half]),
                Record("norm", "gradient norm", "", 0, 0, np.linalg.norm(own)),
                Record("gradient", "a.w", "a", 0, 1, own[half] / np.linalg.norm(own) * (factor if half.stop else 1)),
            ]
            for half, own in zip(halves, gradients, strict=True)
        ]
        return Run([RankRecords(rank, records) for rank, records in enumerate(ranks)])

    tilted = np.concatenate([gradient[:20] * (1 + 2e-3), gradient[20:] * (1 - 2e-3)])
    repeats = [run(gradient * (1 + 4e-3 * sign) + sign * noise) for sign in (1, -1)]
    verdict = compare_runs(run(gradient), repeats, run(tilted, tilted), mesh={"dp": 2})
    assert verdict.equal == equal, verdict.text()


def test_unclear_placements_need_a_line(runs):
    """A parameter of equal values is placed by its module, or must be declared."""
    whole = [Record("weight", "norm.weight", "norm", step, 0, np.ones(6)) for step in (-1, 0)]
    ranks = [[Record("weight", "norm.weight", "norm", step, 0, np.ones(3)) for step in (-1, 0)] for _ in range(2)]
    reference, parallel = (
        Run([RankRecords(0, whole)]),
        Run([RankRecords(n, records) for n, records in enumerate(ranks)]),
    )
    verdict = compare_runs(reference, [reference], parallel, mesh={"tp": 2})
    assert not verdict.equal
    (line,) = verdict.unplaced
    why = "its values before training fit several places on rank 0 (local [3] of [6])"
    assert line == f'parameter norm.weight: {why}; declare it, e.g. {{"norm.weight": "shard(0) over tp"}}'
    declared = {"norm.*": "shard(0) over tp"}
    assert compare_runs(reference, [reference], parallel, mesh={"tp": 2}, declared=declared).equal


def test_the_reference_is_one_rank_with_records(runs):
    """A reference of several ranks, without records or without repeats is refused."""
    reference, repeats, parallel = runs()
    with pytest.raises(
        ValueError, match=r"the reference must be a run on one rank that recorded values; this one has 6"
    ):
        compare_runs(parallel, repeats, parallel)
    with pytest.raises(ValueError, match="the allowed differences are measured from perturbed repeats"):
        compare_runs(reference, [], parallel)


def test_the_report_names_everything(runs):
    """Text and JSON carry the first difference, its cause with evidence, the module and the rest."""
    verdict = compare_runs(*runs(no_reduction("input gradient")))
    text, plain = verdict.text(), verdict.to_json()
    assert text.startswith("DIFFERS first in step 1: the gradient of scale.weight on ranks 0-5\n  numbers: rank ")
    assert "\n  placement: replica\n  cause: missing-reduction over tp: each rank has only the value of its" in text
    assert "  evidence: sum over tp of the ranks' gradients equals the reference within " in text
    assert "then differs after step 1: optimizer state momentum of scale.weight on ranks 0-5 (relative error " in text
    assert "\n  replicas differ on ranks 0-5 in steps 1 to 3: the gradient of scale.weight; " in text
    assert plain["first"]["cause"]["kind"] == "missing-reduction"
    assert plain["equal"] is False
    assert plain["compared"]["gradient"] == 72


def test_masks_that_were_not_recorded_are_listed(runs):
    """A mask that a recorder could not read is not passed over in silence: each module is listed once."""
    reference, repeats, run = runs(mesh={"dp": 2, "tp": 1})
    for rank in (*reference.ranks, *run.ranks):
        rank.notes["masks that were not recorded"] = ["attend"]
    text = "mask of attend: drawn inside a fused attention, which does not give it out"
    assert compare_runs(reference, repeats, run).skipped.count(text) == 1


def test_micro_batches_of_stages_are_compared_as_a_union():
    """Stages call the model for each micro-batch: the last one's rows and losses are those of the step.

    What differs first is then the wrong gradient of a stage, not the loss of a micro-batch.
    """
    rng = np.random.default_rng(0)
    first, last, output = rng.standard_normal((3, 5)), rng.standard_normal((4, 3)), rng.standard_normal((6, 4))
    gradients = {"first.weight": rng.standard_normal((3, 5)), "last.weight": rng.standard_normal((4, 3))}

    def stage(rank, weights, outputs, losses, factor):
        records = [Record("weight", name, name[:-7], -1, 0, value) for name, value in weights.items()]
        records += [Record("output", "(model)", "", 0, call, value) for call, value in enumerate(outputs)]
        records += [Record("loss", "loss", "", 0, call, np.array(value)) for call, value in enumerate(losses)]
        records += [Record("gradient", name, name[:-7], 0, 0, gradients[name] * factor) for name in weights]
        return RankRecords(rank, records)

    reference = Run([stage(0, {"first.weight": first, "last.weight": last}, [output], [output.sum()], 1)])
    parts = np.split(output, 3)

    def verdict(factor):
        ranks = [
            stage(0, {"first.weight": first}, list(rng.standard_normal((3, 2, 3))), [], factor),
            stage(1, {"last.weight": last}, parts, [part.sum() for part in parts], 1),
        ]
        return compare_runs(reference, [reference], Run(ranks), mesh={"pp": 2})

    assert verdict(1).equal
    assert not verdict(1).unplaced
    wrong = verdict(0.5).first
    assert (wrong.kind, wrong.name, wrong.ranks) == ("gradient", "first.weight", (0,))


@pytest.mark.parametrize("off, equal", [(2e-8, True), (1e-4, False)])
def test_gradients_that_no_repeat_moves_are_sums_in_another_order(off, equal):
    """Signs that cancel on the single device leave rounding on ranks, of the size of their terms."""
    signs = np.random.default_rng(5).choice([-1.0, 0.0, 1.0], 20).astype(np.float32)
    weight = np.arange(20, dtype=np.float32)

    def run(*errors):
        return Run([
            RankRecords(rank, [
                Record("weight", "w", "", -1, 0, weight),
                Record("gradient", "w", "", 0, 0, 0.0125 * (signs + error * (signs == 0)).astype(np.float32)),
                Record("weight", "w", "", 0, 0, weight - 0.125 * signs),
            ])
            for rank, error in enumerate(errors)
        ])  # fmt: skip

    verdict = compare_runs(run(0.0), [run(0.0), run(0.0)], run(off, off), mesh={"dp": 2})
    assert verdict.equal == equal, verdict.text()
