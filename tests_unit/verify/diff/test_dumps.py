"""Dumps of msprobe compared: with each other, with ranks merged, with recordings and with programs."""

import base64
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.cli import main
from hyper_parallel.verify.diff.recorded import Pair, judge
from hyper_parallel.verify.diff.recordings import compare_recordings
from hyper_parallel.verify.diff.run import verify_diff
from hyper_parallel.verify.diff.side import DiffSide
from hyper_parallel.verify.diff.together import _merged
from hyper_parallel.verify.frameworks.contract.fingerprint import LARGEST, LEAST, NORM, NUMBERS, SUM, Fingerprint
from hyper_parallel.verify.frameworks.contract.records import Record, Region
from hyper_parallel.verify.input_error import InputError

pytestmark = pytest.mark.platforms("torch")
RECORDING = Path(__file__).parents[1] / "recording"
FIXTURES = runpy.run_path(str(RECORDING / "conftest.py"))
DUMPS = runpy.run_path(str(RECORDING / "dumps.py"))
script, record = FIXTURES["script"], FIXTURES["record"]
describe, training, write = DUMPS["describe"], DUMPS["training"], DUMPS["write"]
SPLIT = {"output *": "shard(1) over {}", "value input * of *": "shard(1) over {}", "input *": "shard(1) over {}",
         "value *tanh*": "shard(1) over {}", "gradient output * of *": "shard(1) over {}",
         "gradient input * of *": "shard(1) over {}", "gradient *": "pending sum over {}"}  # fmt: skip


def split(axis):
    """Declarations of a sequence that is split over an axis."""
    return {name: words.format(axis) for name, words in SPLIT.items()}


@pytest.mark.parametrize("framework", ["pytorch", "mindspore"])
@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dumps_of_equal_runs_and_of_a_bug(tmp_path, framework, task, ranks):
    """Equal dumps and another order of sums have status 0; a scale of 1.01 on one rank is found where it is."""

    def dump(name, **more):
        return training(tmp_path / name, ranks=ranks, framework=framework, task=task, **more)

    report = compare_recordings(dump("a"), dump("b"))
    assert (report.status, report.kind_of_difference) == (0, "none"), report.text()
    assert report.verdict.counts["output"] == 4 * ranks
    hidden = (
        "a dump has no optimizer states" if task == "tensor" else "a dump of statistics has the norm, the mean and the"
    )
    assert hidden in report.text()
    report = compare_recordings(tmp_path / "a", dump("order", bug="order"))
    assert (report.status, report.kind_of_difference) == (0, "order of sums"), report.text()
    report = compare_recordings(tmp_path / "a", dump("bug", bug="scale", where=(1, ranks - 1)))
    first = report.verdict.first
    assert (report.status, first.kind, first.name, first.module) == (1, "value", "input 0 of down", "down")
    assert (first.step, first.ranks, first.site) == (1, (ranks - 1,), "train.py:21")
    assert ("; sum " in first.why) == (task == "statistics")


def test_statistics_are_compared_with_tensors_and_frameworks_with_each_other(tmp_path):
    """What both dumps have is compared, and what one of them alone has is listed."""
    one, two = training(tmp_path / "a", task="tensor"), training(tmp_path / "b", framework="mindspore")
    report = compare_recordings(one, two)
    assert report.status == 0, report.text()
    assert report.platforms == ("torch", "mindspore")
    assert any("Functional.tanh" in line and "only A has it" in line for line in report.verdict.skipped)
    report = compare_recordings(two, training(tmp_path / "c", task="tensor", bug="scale"))
    assert report.verdict.first.name == "input 0 of down"


@pytest.mark.parametrize("task", ["statistics", "tensor"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_context_parallelism_are_merged(tmp_path, task, ranks):
    """Uneven parts of a sequence are merged by declarations and compared with one rank; a bug of one rank is found."""
    alone, parts = training(tmp_path / "a", task=task), training(tmp_path / "b", ranks=ranks, task=task)
    report = compare_recordings(alone, parts, declared=split("world"))
    assert report.status == 0, report.text()
    assert report.verdict.counts["output"] == 4
    assert report.verdict.counts["gradient"] == 4
    assert any(
        "gradient of up.weight" in line and "on the ranks of B a sum is pending" in line
        for line in report.verdict.skipped
    )
    wrong = training(tmp_path / "c", ranks=ranks, task=task, bug="scale", where=(0, 1))
    report = compare_recordings(wrong, alone, declared=split("world"))
    assert (report.status, report.verdict.first.name, report.verdict.first.step) == (1, "input 0 of down", 0)
    report = compare_recordings(alone, parts)
    assert report.status == 3 or not report.verdict.counts["output"], report.text()
    assert any("each has its own, or a shard" in line for line in report.verdict.skipped)


@pytest.mark.parametrize("copies", [2, 3])
def test_axes_of_a_mesh(tmp_path, capsys, copies):
    """Parts over one axis and copies over another are merged; a copy that is not its like is not."""
    alone, parts = training(tmp_path / "a"), training(tmp_path / "b", ranks=2, copies=copies)
    words = [word for name, line in split("cp").items() for word in ("--declare", f"{name}={line}")]
    command = ["verify", "diff", str(alone), str(parts), "--b-mesh", f"cp=2,dp={copies}", *words, "--json"]
    assert main(command) == 0
    assert "4 outputs" in json.loads(capsys.readouterr().out)["headline"]
    wrong = training(tmp_path / "c", ranks=2, copies=copies, bug="scale", where=(0, 1))
    report = compare_recordings(alone, wrong, declared=split("cp"), meshes=(None, {"cp": 2, "dp": copies}))
    assert report.status == 3
    assert "INCONCLUSIVE: recorded value input 0 of down, the output of down, " in report.text()
    words = "declared parts make no value on the ranks of B: copies differ, or parts are missing"
    assert report.inconclusive.endswith(words)
    assert report.inconclusive in report.verdict.skipped


def test_declarations_on_as_many_ranks(tmp_path):
    """With declarations, runs on as many ranks are merged too, so that other layouts are compared."""
    two, again = training(tmp_path / "a", ranks=2), training(tmp_path / "b", ranks=2)
    report = compare_recordings(two, again, declared={**split("world"), "value *tanh*": "local"})
    assert report.status == 0
    assert report.verdict.counts["output"] == 4
    assert not any("tanh" in line for line in report.verdict.skipped)


def refused(*arguments, **options):
    """The message with which a comparison is refused."""
    with pytest.raises(InputError) as error:
        compare_recordings(*arguments, **options)
    return str(error.value)


def test_declarations_that_do_not_fit(tmp_path, capsys):
    """Unknown axes, names and dims, meshes of another size, and meshes of programs are refused by name."""
    one, two = training(tmp_path / "a"), training(tmp_path / "b", ranks=2)
    assert refused(one, two, declared={"output up": "shard(1) over cp"}) == (
        "the declaration 'shard(1) over cp' names axis 'cp'; the program has world"
    )
    assert refused(one, two, declared={"outputs upp": "replica"}) == (
        "--declare outputs upp: no value of A or B has such a name"
    )
    assert refused(one, two, declared={"downn": "replica"}) == (
        "--declare downn: no value of A or B has such a name; did you mean down?"
    )
    assert refused(one, two, declared={"output up": "shard(3) over world"}) == (
        "--declare 'shard(3) over world' does not fit up, which has 3 dims"
    )
    assert refused(one, two, declared={"output up": "replica"}, meshes=(None, {"cp": 3})) == (
        "the mesh cp=3 has 3 ranks, the program ran on 2"
    )
    (tmp_path / "train.py").write_text("")
    program = str(tmp_path / "train.py")
    for sides in ([program, str(one)], [program, program]):
        assert main(["verify", "diff", *sides, "--a-mesh", "cp=1"]) == 2
        assert "--a-mesh and --b-mesh name the axes of two recordings" in capsys.readouterr().err
    assert main(["verify", "diff", str(one), str(two), "--b-mesh", "cp=x"]) == 2
    assert "--b-mesh 'cp=x' must look like 3, 2x2 or dp=2,tp=3" in capsys.readouterr().err


def test_statistics_that_are_not_merged():
    """Overlapping, missing and unequal parts, parts without a place, and fingerprints make no value."""

    def part(start, size, norm=1.0, known=(NORM, SUM, LEAST, LARGEST), shape=(7, 3), **more):
        numbers = np.full(len(NUMBERS), norm)
        value = Fingerprint(numbers, (size, 3), "float32", known=known)
        return Record("output", "up", "up", 0, 0, value, Region(shape, (start, 0), **more))

    both = [part(0, 4, 3.0), part(4, 3, 4.0)]
    merged = _merged([*both, part(4, 3, 4.0), part(7, 0, np.nan)], (7, 3)).value
    assert merged.numbers[[NORM, SUM, LEAST, LARGEST]].tolist() == [5.0, 7.0, 3.0, 4.0]
    assert (merged.shape, set(merged.known)) == ((7, 3), {NORM, SUM, LEAST, LARGEST})
    assert _merged([part(0, 4, known=(NORM, SUM)), part(4, 3)], (7, 3)).value.known == (NORM, SUM)
    for wrong in (
        [both[0]], [both[0], part(3, 3)], [*both, part(4, 3, 5.0)], [part(0, 4, known=None), part(4, 3, known=None)],
        [part(0, 4), part(2, 3)], [part(0, 4, spans=((0, 12),)), both[1]],
    ):  # fmt: skip
        assert _merged(wrong, (7, 3)) is None


def test_another_start_of_dumps(tmp_path):
    """Other weights and other first inputs are said first; from a later step on they are values."""
    one = training(tmp_path / "a")
    report = compare_recordings(one, training(tmp_path / "b", seed=1))
    assert (report.kind_of_difference, report.verdict.first.cause.kind) == ("another start", "other-weights")
    report = compare_recordings(one, training(tmp_path / "c", bug="samples"))
    assert (report.kind_of_difference, report.verdict.first.cause.kind) == ("another start", "other-samples")
    late = training(tmp_path / "late", steps=(1,))
    report = compare_recordings(late, training(tmp_path / "d", seed=1, steps=(1,)))
    assert (report.verdict.first.kind, report.verdict.first.name) == ("value", "parameter up.weight")
    report = compare_recordings(one, late)
    assert report.status == 0, report.text()
    assert "steps that only A has: step 1" in report.text()


def test_numbers_that_are_not_finite(tmp_path):
    """Where a dump has no count of them, NaN differs from numbers and is equal to itself."""
    one, nan = training(tmp_path / "a"), training(tmp_path / "b", bug="nan")
    report = compare_recordings(one, nan)
    assert report.verdict.first.name == "input 0 of down"
    assert "some of 154 elements are not finite, and 0 of A's" in report.text()
    assert compare_recordings(nan, nan).status == 0


def with_outputs(folder, *tensors):
    """A dump of one module with outputs."""
    write(folder / "step0" / "rank0", {"Module.up.Linear.forward.0": {
        "output": list(tensors), "parameters": {"weight": describe(np.ones((3, 5), np.float32))}}})  # fmt: skip
    return folder


def test_extremes_alone(tmp_path):
    """Dumps without norms, as of msprobe's precision high, are compared by extremes, and integers exactly."""
    array = np.random.default_rng(1).normal(size=(5, 3))
    high = {"Norm": None, "Mean": None}
    one = with_outputs(tmp_path / "a", describe(array) | high, describe(np.arange(9)))
    two = with_outputs(tmp_path / "b", describe(array * (1 + 2**-22)) | high, describe(np.arange(9)))
    assert compare_recordings(one, two).kind_of_difference == "order of sums"
    wrong = with_outputs(tmp_path / "c", describe(array * 1.01) | high, describe(np.arange(9) + 1))
    report = compare_recordings(one, wrong)
    assert "numbers from " in report.verdict.differences[0].why
    assert "integers differ: their largest is 9, and A's 8" in report.verdict.differences[1].why
    given = describe(array)
    ends = {name: given[name] for name in ("type", "dtype", "shape", "Max", "Min")}
    norms = {name: given[name] for name in ("type", "dtype", "shape", "Norm")}
    report = compare_recordings(with_outputs(tmp_path / "d", ends), with_outputs(tmp_path / "e", norms))
    assert any("the output of up: A and B have other numbers of it" in line for line in report.verdict.skipped)


def statistics(value):
    """What a dump has of an array."""
    numbers = np.full(len(NUMBERS), np.nan)
    numbers[[NORM, SUM, LEAST, LARGEST]] = np.linalg.norm(value), value.sum(), value.min(), value.max()
    numbers[4] = 0
    return Fingerprint(numbers, value.shape, "float32", known=(NORM, SUM, LEAST, LARGEST, 4))


def test_updates_of_weights_whose_norms_stay(tmp_path):
    """Statistics show little of an update that keeps a norm, so the largest update of a step counts for all weights."""
    rng = np.random.default_rng(3)
    value = rng.normal(size=900)

    def pair(step, name, one, other, kind="weight"):
        one, two = statistics(one), statistics(other)
        return Pair(Record(kind, name, "", step, 0, one), one, two, 0)

    kept = value * (1 + 1e-4)
    pairs = [
        pair(-1, "a", value, value), pair(-1, "b", value, value), pair(0, "g", value, value * (1 + 1e-7), "gradient"),
        pair(0, "a", value * 1.01, value * 1.01), pair(0, "b", value, kept),
    ]  # fmt: skip
    assert not any(each.differs for each in judge([pairs]))
    assert any(each.differs for each in judge([[*pairs[:3], pair(0, "a", value, value), pairs[-1]]]))


def dump_of(recording, folder):
    """The dump that a run would have had of which all elements were recorded."""
    found = [json.loads(line) for line in (recording / "rank-0.jsonl").read_text().splitlines()]
    for step in range(3):
        data = {}
        for line in found:
            if line.get("kind") not in ("output", "weight", "gradient"):
                continue
            array = np.frombuffer(base64.b64decode(line["whole"]), line["array"]).reshape(line["shape"])
            tensor = describe(array, dtype=line["dtype"])
            module, _, last = line["name"].rpartition(".")
            if line["kind"] == "output" and line["step"] == step and line["name"] != "(model)":
                data.setdefault(f"Module.{line['name']}.Any.forward.0", {})["output"] = [tensor]
            elif line["kind"] == "weight" and line["step"] == step - 1:
                entry = data.setdefault(f"Module.{module}.Any.forward.0", {})
                entry.setdefault("parameters", {})[last] = tensor
            elif line["kind"] == "gradient" and line["step"] == step:
                data.setdefault(f"Module.{module}.Any.parameters_grad.0", {})[last] = [describe(2 * array)]
        write(folder / f"step{step}" / "rank0", data)
    return folder


def test_a_dump_and_a_recording_or_a_program(record, script, tmp_path):
    """Outputs and weights of a dump are compared with those of recordings and programs; its gradients are listed."""
    whole = record("a", whole=["*"])
    dump = dump_of(whole, tmp_path / "dump")
    report = compare_recordings(dump, whole)
    assert report.status == 0, report.text()
    assert report.verdict.counts == {"weight": 15, "output": 9}
    gradients = (
        "gradients: those of a dump are of one backward pass, before sums over ranks and micro-batches and before "
        "clipping"
    )
    assert gradients in report.verdict.skipped
    report = compare_recordings(record("bug", "--variant", "bug"), dump)
    assert (report.status, report.verdict.first.name, report.verdict.first.step) == (1, "middle", 1)
    ran = verify_diff(DiffSide(str(dump)), DiffSide(str(script)))
    assert ran.status == 0, ran.text()
    assert gradients in ran.verdict.skipped
    wrong = dump_of(record("wrong", "--variant", "bug", whole=["*"]), tmp_path / "wrong")
    ran = verify_diff(DiffSide(str(script)), DiffSide(str(wrong)))
    assert (ran.status, ran.verdict.first.name, ran.verdict.first.step) == (1, "middle", 1), ran.text()
