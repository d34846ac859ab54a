"""Training steps and saves beside PyTorch's own parallelism: what is measured, not its values."""

import json
import math

import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


def test_steps_are_measured_in_every_style():
    """Both implementations train the same model in each style, and every row has its own time."""

    def rank():
        from torch import distributed

        from workshop.bench.torch.training import Size, step_rows

        distributed.init_process_group("gloo")
        return list(step_rows("tiny model", Size(16, 1, 6, 1, 1), 0.5))

    rows = simulate(rank, 2, "torch")[0]
    styles = ("fully_shard", "tensor parallel", "sequence parallel")
    assert [row.name for row in rows] == [f"tiny model, {style}, 2 ranks" for style in styles]
    assert all(row.plain > 0 and row.ours > 0 and row.ratio == row.ours / row.plain for row in rows)
    assert [row.budget for row in rows] == [0.5] * 3


def test_other_losses_end_the_run(monkeypatch):
    """Times of different computations are not compared: the losses of both are named."""
    from workshop.bench.torch import training as training_benchmark

    monkeypatch.setattr(training_benchmark, "_step", lambda *_, peer: lambda: 1.0 if peer else 1.5)
    with pytest.raises(ValueError, match="the losses") as caught:
        next(training_benchmark.step_rows("tiny model", training_benchmark.Size(16, 1, 6, 1, 1), 0.5))
    assert str(caught.value) == (
        "tiny model, fully_shard: the losses of PyTorch's own parallelism are [1.0, 1.0, 1.0], "
        "this library's [1.5, 1.5, 1.5]"
    )


def test_a_save_is_measured(tmp_path):
    """The sharded checkpoint and the one file hold as many numbers."""

    def rank():
        from torch import distributed

        from workshop.bench.torch.training import checkpoint_row

        distributed.init_process_group("gloo")
        return checkpoint_row(tmp_path, 16 * 2 * 5, turns=1)

    row = simulate(rank, 2, "torch")[0]
    assert (row.name, row.budget) == (f"save of {640 / 2**30:g} GiB, 2 ranks", 1 / 0.7)
    (sharded,) = (tmp_path / "sharded").glob("*.safetensors")
    assert sharded.stat().st_size >= 640 <= (tmp_path / "whole.safetensors").stat().st_size


@pytest.mark.parametrize("ranks, last", [(2, "wide model"), (3, "save")])
def test_rank_0_writes_the_rows(ranks, last, monkeypatch, tmp_path):
    """A rank's program begins the process group, and rank 0 writes what was measured."""
    from workshop.bench.torch import training as training_benchmark
    from workshop.bench.turns import BenchmarkRow

    def row(name):
        return BenchmarkRow(name, 2.0, None, 1.0, 0.5, by_hand=True)

    monkeypatch.setattr(training_benchmark, "step_rows", lambda model, *_: iter([row(model)]))
    monkeypatch.setattr(training_benchmark, "checkpoint_row", lambda *_: row("save"))
    report = tmp_path / "rows.json"

    def rank():
        training_benchmark.main(str(report))

    simulate(rank, ranks, "torch")
    rows = json.loads(report.read_text())
    assert [row["name"] for row in rows] == ["small model", last]
    assert all(math.isclose(row["ours"], 1.0) for row in rows)
