"""Recordings compared: with each other and with their program, by fingerprints."""

import json
import runpy
import shutil
from pathlib import Path

import pytest

from hyper_parallel.cli import main
from hyper_parallel.verify.diff.recorded import Judged, Pair, judge
from hyper_parallel.verify.diff.recordings import compare_recordings
from hyper_parallel.verify.diff.run import verify_diff
from hyper_parallel.verify.diff.side import DiffSide
from hyper_parallel.verify.frameworks.contract.fingerprint import fingerprint_of
from hyper_parallel.verify.frameworks.contract.records import Record
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
    assert report.verdict.counts["gradient"] == 30


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
    assert both.verdict.counts["gradient"] == 2 * 3 * 2 * 4  # without the partial bias


def test_other_numbers_of_ranks(record, tmp_path):
    """What all ranks have alike is compared with another number of ranks; each rank's own values are listed."""

    def own(rank, line):
        if rank and line.get("kind") == "output":
            line["numbers"] = [2 * number for number in line["numbers"]]
        return line

    alone = record("a")
    report = compare_recordings(alone, with_ranks(alone, tmp_path / "two", own))
    assert report.status == 0
    assert report.verdict.counts["gradient"] == 30
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
    import numpy as np

    values = np.linspace(1, 2, 50)
    off = [1e-15 * 20**power for power in range(12)]
    judged = judge([[pair(0, place, values, values * (1 + each)) for place, each in enumerate(off)]])
    assert not any(each.differs for each in judged)
    assert [each.unjudged for each in judged] == [False] * 11 + [True]
    jump = judge([[pair(0, 0, values, values * (1 + 1e-15)), pair(0, 1, values, values * (1 + 1e-9))]])
    assert [each.differs for each in jump] == [False, True]


def test_rounding_of_another_rank_explains_and_its_errors_do_not():
    """A rank gets what others have rounded in the same step; what no rank explains differs on all."""
    import numpy as np

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
