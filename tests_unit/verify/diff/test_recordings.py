"""Recordings compared: with each other and with their program, by fingerprints."""

import base64
import json
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.cli import main
from hyper_parallel.verify.diff.recorded import Judged, Pair, judge
from hyper_parallel.verify.diff.recordings import compare_recordings
from hyper_parallel.verify.diff.run import verify_diff
from hyper_parallel.verify.diff.side import DiffSide
from hyper_parallel.verify.diff.together import _together
from hyper_parallel.verify.frameworks.contract.fingerprint import fingerprint_of
from hyper_parallel.verify.frameworks.contract.records import Pending, Record, Region
from hyper_parallel.verify.input_error import InputError

pytestmark = pytest.mark.platforms("torch")
FIXTURES = runpy.run_path(str(Path(__file__).parents[1] / "recording" / "conftest.py"))
script, record = FIXTURES["script"], FIXTURES["record"]


def lines(folder, rank=0):
    """The lines of a rank's file, parsed."""
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


def write(folder, parsed, rank=0):
    """Write lines to a rank's file."""
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in parsed))


def with_ranks(folder, target, change=lambda _, line: line):
    """A recording of two ranks, made of one on one rank."""
    for rank in range(2):
        header, *rest = lines(folder)
        header = {**header, "rank": rank, "world_size": 2}
        write(target, [header, *(change(rank, dict(line)) for line in rest)], rank)
    return target


def test_equal_runs_have_equal_fingerprints(record):
    """The same run twice: status 0, and the report says the blind spots of fingerprints."""
    report = compare_recordings(record("a"), record("b"))
    assert (report.status, report.kind_of_difference, report.first_bits) == (0, "none", "")
    assert "all fingerprints are equal" in report.text()
    assert "cannot expose an error that is within the tolerance of all of these" in report.text()
    assert report.json()["fingerprints"] is True
    assert report.verdict.counts["gradient"] == 15


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_another_order_of_sums_is_no_difference(record, dtype, optimizer):
    """Sums in another order differ in bits, from the module that sums, and are called that: status 0."""
    words = ("--dtype", dtype, "--optimizer", optimizer)
    report = compare_recordings(record("a", *words), record("b", *words, "--variant", "order"))
    assert (report.status, report.kind_of_difference) == (0, "order of sums"), report.text()
    assert "fingerprints differ first in step 1 in the output of middle" in report.text()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_seeded_bug_is_found_where_it_is(record, dtype):
    """A scale of one in a thousand, from the second step on, is found in its module and in its step."""
    words = ("--dtype", dtype)
    report = compare_recordings(record("a", *words, "--variant", "order"), record("b", *words, "--variant", "bug"))
    assert (report.status, report.kind_of_difference) == (1, "another computation")
    first = report.verdict.first
    assert (first.kind, first.name, first.step) == ("output", "middle", 1)
    assert "train.py:" in report.text()
    assert "all values before it are equal but for rounding, as far as fingerprints show" in report.text()


def test_numbers_that_are_not_finite_and_integers(record):
    """NaN on one side differs where it begins, and is equal to itself; integers differ exactly."""
    plain, nan = record("a"), record("nan", "--variant", "nan")
    report = compare_recordings(plain, nan)
    assert report.verdict.first.name == "middle"
    assert "102 of 102 elements are not finite, and 0 of A's" in report.text()
    assert compare_recordings(nan, nan).status == 0
    report = compare_recordings(plain, record("count", "--variant", "count"))
    assert (report.verdict.first.kind, report.verdict.first.step) == ("buffer", 2)
    assert "integers differ: their sum is 4, and A's 3" in report.text()


@pytest.mark.parametrize("option, cause", [("--seed", "other-weights"), ("--data", "other-samples")])
def test_another_start_ends_the_comparison(record, option, cause):
    """Other weights or samples are said first, and nothing that follows is counted."""
    report = compare_recordings(record("a"), record("b", option, "1"))
    assert (report.status, report.kind_of_difference) == (1, "another start")
    assert report.verdict.first.cause.kind == cause
    assert "the runs do not start alike" in report.text()


def test_calls_are_aligned(record):
    """A run that calls modules more often is aligned by what they returned."""
    report = compare_recordings(record("a"), record("b", "--variant", "more"))
    assert report.status == 0, report.text()
    assert any("calls were aligned" in note for note in report.verdict.notes)


def test_runs_without_a_common_name_or_step(record):
    """Recordings that share no parameter name the nearest ones; without a common step they say which each has."""
    with pytest.raises(InputError, match="A and B share no parameter and no recorded value"):
        compare_recordings(record("a"), record("renamed", "--variant", "renamed"))
    parsed = lines(record("b"))
    write(record("c").parent / "late", [line for line in parsed if line.get("step", 2) in (-1, 2)])
    early = record("d", steps=1)
    with pytest.raises(InputError) as error:
        compare_recordings(early, early.parent / "late")
    assert str(error.value) == "A and B share no step, so nothing can be compared: A has step 1, B has step 3"
    assert "steps that only A has: steps 1-2" in compare_recordings(record("e"), early.parent / "late").text()


def test_other_shards_are_not_compared(record, tmp_path):
    """Values that are sharded otherwise are listed and not guessed; partial sums are left out."""

    def sharded(rank, line):
        if line.get("name") == "out.weight":
            line["region"] = {"shape": [6, 17], "start": [3 * rank, 0]}
        if line.get("name") == "into.bias":
            line["region"] = {"shape": [17], "start": [0], "pending": [["sum", [0, 1]]], "spans": [[0, 17]]}
        return line

    one, two = with_ranks(record("a"), tmp_path / "plain"), with_ranks(tmp_path / "a", tmp_path / "shards", sharded)
    report = compare_recordings(one, two)
    assert report.status == 0
    assert any("A and B have other shards" in line and "out.weight" in line for line in report.verdict.skipped)
    both = compare_recordings(two, two)
    assert both.verdict.counts["gradient"] == 2 * 3 * 4  # without the partial bias


def test_other_numbers_of_ranks(record, tmp_path):
    """What all ranks have alike is compared with another number of ranks; each rank's own values are listed."""

    def own(rank, line):
        if rank and line.get("kind") == "output":
            line["numbers"] = [2 * number for number in line["numbers"]]
        return line

    alone = record("a")
    report = compare_recordings(alone, with_ranks(alone, tmp_path / "two", own))
    assert report.status == 0
    assert report.verdict.counts["gradient"] == 15
    assert any("on the ranks of B each has its own, or a shard" in line for line in report.verdict.skipped)
    with pytest.raises(InputError, match="A and B share no value that can be compared"):
        compare_recordings(alone, with_ranks(alone, tmp_path / "none", doubled))


def test_only_settings_are_equal(record, tmp_path):
    """Where neither gradients nor updated weights can be compared, equal rates and initial weights have status 3."""

    def own(rank, line):
        return doubled(rank, line) if line.get("kind") != "rate" and line.get("step", -1) >= 0 else line

    alone = record("a")
    report = compare_recordings(alone, with_ranks(alone, tmp_path / "two", own))
    assert set(report.verdict.counts) <= {"rate", "weight", "buffer"}
    assert {"rate", "weight"} <= set(report.verdict.counts)
    assert report.status == 3
    assert "all fingerprints that were compared are equal" in report.text()
    assert (
        "INCONCLUSIVE: no gradient and no updated parameter could be compared; record both runs on as many ranks with "
        "the same shards, or compare each with its program (verify diff FOLDER train.py)"
    ) in report.text()
    start = [line for line in lines(alone) if line.get("kind") not in ("gradient", "weight") or line["step"] < 0]
    write(tmp_path / "forward", start)
    assert compare_recordings(tmp_path / "forward", tmp_path / "forward").status == 0  # there is nothing else


def with_array(line, change):
    """A line whose array is changed, though its numbers are not: as an error in few elements leaves them."""
    array = np.frombuffer(base64.b64decode(line["whole"]), line["array"]).reshape(line["shape"]).copy()
    changed = change(array)
    line["whole"] = base64.b64encode(np.ascontiguousarray(array if changed is None else changed).tobytes()).decode()
    return line


def of_output(change, step=1):
    """A function that changes the array of the output of `middle` in a step."""

    def changed(_, line):
        is_middle = (line.get("kind"), line.get("name"), line.get("step")) == ("output", "middle", step)
        return with_array(line, change) if is_middle else line

    return changed


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_all_elements_of_right_runs_are_within_rounding(record, script, dtype, optimizer):
    """Where all elements are recorded, another order of sums is no difference, with a recording and with a program."""
    words = ("--dtype", dtype, "--optimizer", optimizer)
    one, two = record("a", *words, whole=["*"]), record("b", *words, "--variant", "order", whole=["*"])
    report = compare_recordings(one, two)
    assert (report.status, report.kind_of_difference) == (0, "order of sums"), report.text()
    number = sum(report.verdict.counts.values())
    assert f"{number} of {number} values were recorded with all elements" in report.text()
    ran = verify_diff(DiffSide(str(script), words), DiffSide(str(two)))
    assert (ran.status, ran.kind_of_difference) == (0, "order of sums"), ran.text()
    assert "values were recorded with all elements, and compared by element" in ran.text()


def test_an_error_in_one_element_is_found_in_whole_tensors(record, script, tmp_path):
    """One wrong element that no fingerprint shows is found and named, between recordings and with a program."""
    plain = record("a", whole=["middle"])

    def wrong(array):
        array[4, 5] += 0.01

    two = with_ranks(plain, tmp_path / "two")
    for name, folder in (("element", wrong), ("nan", lambda array: array.__setitem__((2, 3), np.nan))):
        other = with_ranks(plain, tmp_path / name, of_output(folder))
        report = compare_recordings(two, other)
        assert (report.status, report.verdict.first.name, report.verdict.first.step) == (1, "middle", 1), report.text()
        words = "(1 of 102 elements differ, " if name == "element" else "1 element that is inf or nan, A 0"
        assert words in report.text()
    header, *rest = lines(plain)
    write(tmp_path / "one", [header, *(of_output(wrong)(0, dict(line)) for line in rest)])
    ran = verify_diff(DiffSide(str(tmp_path / "one")), DiffSide(str(script)))
    assert (ran.status, ran.verdict.first.name, ran.verdict.first.step) == (1, "middle", 1), ran.text()
    assert "at [4, 5], B" in ran.verdict.first.why
    other = record("other", "--data", "1", whole=["*"])
    assert verify_diff(DiffSide(str(other)), DiffSide(str(script))).kind_of_difference == "another start"


def test_elements_that_are_not_finite_are_compared_in_their_places(record, tmp_path):
    """Equal NaN on both sides is no difference, and the other elements are compared next to it."""
    plain = record("a", "--variant", "nan", whole=["middle"])

    def some(wrong):
        def change(array):
            array[:] = np.linspace(0, 1, array.size).reshape(array.shape)
            array[0, :2] = np.inf, np.nan
            array[-1, -1] += wrong

        return with_ranks(plain, tmp_path / f"some-{wrong}", of_output(change))

    assert compare_recordings(some(0), some(0)).status == 0
    report = compare_recordings(some(0), some(0.01))
    assert report.verdict.first.name == "middle"
    assert "(1 of 102 elements differ" in report.text()


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_are_put_together_where_all_elements_are_there(record, tmp_path, ranks):
    """Uneven shards are compared with another number of ranks: equal ones pass, a wrong element or replica does not."""
    alone = record("a", whole=["out.*"])

    def shards(name, change=lambda _, array: array):
        header, *rest = lines(alone)
        for rank in range(ranks):
            changed = [dict(line) for line in rest]
            for line in changed:
                if line.get("name") == "middle.weight":
                    doubled(rank, line)
                if line.get("name") == "out.weight":
                    start = (0, 6, 11)[rank]
                    size = ([6, 11] if ranks == 2 else [6, 5, 6])[rank]
                    with_array(line, lambda array, r=rank, at=slice(start, start + size): change(r, array[:, at]))
                    array = np.frombuffer(base64.b64decode(line["whole"]), line["array"]).reshape(3, size)
                    line["numbers"] = fingerprint_of(array).numbers.tolist()
                    line["region"] = {"shape": line["shape"], "start": [0, start]}
                    line["shape"] = [3, size]
            write(tmp_path / name, [{**header, "rank": rank, "world_size": ranks}, *changed], rank)
        return tmp_path / name

    report = compare_recordings(alone, shards("right"))
    assert report.status == 0, report.text()
    assert report.verdict.counts["gradient"] == 15 - 3
    assert not any("out.weight" in line for line in report.verdict.skipped)
    assert any("out.weight" not in line and "each has its own" in line for line in report.verdict.skipped)
    wrong = shards("wrong", lambda rank, array: array + (rank == 1) * 1e-3)
    report = compare_recordings(alone, wrong)
    assert (report.status, report.verdict.first.name) == (1, "out.weight")


def test_parts_that_do_not_make_a_value_are_not_put_together():
    """Missing or unequal replicas, missing parts, partial sums, other shapes and unknown elements make no value."""
    value = np.random.default_rng(3).normal(size=(5, 3))

    def part(start, array, shape=(5, 3), pending=(), *, whole=True):
        fingerprint = replace(fingerprint_of(array), whole=array if whole else None)
        return Record("gradient", "w", "", 0, 0, fingerprint, Region(shape, (start, 0), pending))

    first, last = part(0, value[:2]), part(2, value[2:])
    assert np.array_equal(_together([first, last, part(1, value[1:3])]).value.whole, value)
    sums = (Pending("sum", (0, 1)),)
    for wrong in (
        [first], [first, part(2, value[2:], whole=False)], [first, last, part(1, value[1:3] + 1)],
        [part(0, value, pending=sums)], [first, part(2, value[2:], (6, 3))], [replace(first, region=None), last],
    ):  # fmt: skip
        assert _together(wrong) is None


def doubled(rank, line):
    """A line of rank 1 whose numbers are others than rank 0's."""
    if rank and "numbers" in line:
        line["numbers"] = [2 * number + 1 for number in line["numbers"]]
    return line


def pair(step, place, value, other, kind="output", rank=0):
    """One value of both recordings."""
    one, two = fingerprint_of(value), fingerprint_of(other)
    return Pair(Record(kind, f"m{place}", f"m{place}", step, 0, one), one, two, rank)


def test_rounding_grows_until_nothing_is_judged():
    """Rounding explains multiples of what came before; where that is half of a value, nothing is judged any more."""
    values = np.linspace(1, 2, 50)
    off = [1e-15 * 20**power for power in range(12)]
    judged = judge([[pair(0, place, values, values * (1 + each)) for place, each in enumerate(off)]])
    assert not any(each.differs for each in judged)
    assert [each.unjudged for each in judged] == [False] * 11 + [True]
    jump = judge([[pair(0, 0, values, values * (1 + 1e-15)), pair(0, 1, values, values * (1 + 1e-9))]])
    assert [each.differs for each in jump] == [False, True]


def test_rounding_of_another_rank_explains_and_its_errors_do_not():
    """A rank gets what others have rounded in the same step; what no rank explains differs on all."""
    values = np.linspace(1, 2, 50)
    grown = [pair(0, place, values, values * (1 + each)) for place, each in enumerate([1e-15, 2e-14, 4e-13])]
    got = [pair(0, 0, values, values * (1 + 8e-12), rank=1)]
    assert not any(each.differs for each in judge([grown, got]))
    wrong = [pair(0, 0, values, values * 1.01), pair(0, 1, values, values * 1.02)]
    got = [pair(0, 0, values, values * 1.02, rank=1)]
    assert all(each.differs for each in judge([wrong, got]))


def test_a_verdict_of_little_has_status_3(record, monkeypatch):
    """Values that could not be judged make an equal verdict inconclusive, with the way out."""
    from hyper_parallel.verify.diff import recordings

    plain = recordings.judge
    monkeypatch.setattr(recordings, "judge", lambda pairs: [Judged(each.pair, each.off, 0.6) for each in plain(pairs)])
    report = compare_recordings(record("a"), record("b", "--variant", "order"))
    assert report.status == 3
    assert "could not be judged: rounding has grown so much before them" in report.text()


def test_a_recording_and_its_program(record, script):
    """The program's repeats measure rounding: equal and reordered recordings pass, a bug is found where it is."""
    for name, status, kind in (("a", 0, "none"), ("order", 0, "order of sums"), ("bug", 1, "another computation")):
        words = ("--variant", name) if name != "a" else ()
        report = verify_diff(DiffSide(str(record(name, *words))), DiffSide(str(script)))
        assert (report.status, report.kind_of_difference) == (status, kind), report.text()
    assert (report.verdict.first.name, report.verdict.first.step) == ("middle", 1)
    assert "B's" in report.verdict.first.why
    assert 0 < report.verdict.power.largest < 1e-3
    again = verify_diff(DiffSide(str(script)), DiffSide(str(record("seed", "--seed", "1"))))
    assert again.kind_of_difference == "another start"


def test_a_recording_of_two_ranks_and_its_program(record, script, tmp_path):
    """A program runs simulated on as many ranks as were recorded, and each rank is compared with its own."""
    one = record("a")
    two = with_ranks(one, tmp_path / "two")
    report = verify_diff(DiffSide(str(two)), DiffSide(str(script)))
    assert report.kind_of_difference == "another start"  # each rank of the program has its part of the batch
    assert report.verdict.first.cause.kind == "other-samples"
    assert "of the shape [6, 9], and B's of [3, 9]" in report.text()


def refused(first, second, **options):
    """The message with which a comparison is refused."""
    with pytest.raises(InputError) as error:
        verify_diff(first, second, **options)
    return str(error.value)


def test_what_does_not_apply_to_recordings_is_refused(record, script):
    """Options of programs on recordings, other world sizes, and names that no run shares are refused by name."""
    folder, program = str(record("a")), str(script)
    assert refused(DiffSide(folder, revision="HEAD", world_size=2, launch="threads"), DiffSide(program)) == (
        "A is a recording, which is not run: leave --a-rev, --a-world-size, --a-launch out"
    )
    assert refused(DiffSide(folder, single_args=()), DiffSide(folder)) == (
        "A is a recording, which is not run: leave --a-single-args out"
    )
    assert refused(DiffSide(folder), DiffSide(folder), steps=2) == (
        "--steps stops a program; of two recordings all steps that both have are compared"
    )
    assert refused(DiffSide(folder), DiffSide(program, world_size=3)) == (
        "A was recorded on 1 ranks; B has 3: leave its world size out"
    )
    late = Path(folder).parent / "late"
    write(late, [line for line in lines(Path(folder)) if line.get("step", 2) in (-1, 2)])
    assert refused(DiffSide(str(late)), DiffSide(program), steps=1) == (
        "the program and the recording share no step: B has step 1, and A step 3"
    )


def test_the_command_compares_recordings(record, capsys):
    """`verify diff FOLDER FOLDER` prints the report; a folder that has no recording is refused."""
    one = record("a")
    two = Path(shutil.copytree(one, one.parent / "copy"))
    assert main(["verify", "diff", str(one), str(two), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] == "none"
    (one.parent / "empty").mkdir()
    assert main(["verify", "diff", str(one), str(one.parent / "empty")]) == 2
    assert "is a folder, but not a recording" in capsys.readouterr().err
