"""`verify diff`: runs that sum in another order are equal; others are distinguished at the module where they part."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyper_parallel.verify.diff.run import verify_diff
from hyper_parallel.verify.diff.side import DiffSide
from hyper_parallel.verify.input_error import InputError

pytestmark = pytest.mark.platforms("torch")
PROGRAMS = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("programs.py"))))


@pytest.fixture
def script(tmp_path):
    """A script whose options change the order of its sums, or what it computes."""
    (tmp_path / "train.py").write_text(PROGRAMS.SCRIPT)
    return str(tmp_path / "train.py")


def diff(script, first=(), second=(), sizes=(1, 1), **options):
    """Compare the script with some arguments and with others, on ranks that are threads."""
    sides = [DiffSide(script, tuple(args), size, "threads") for args, size in zip((first, second), sizes, strict=True)]
    return verify_diff(*sides, **options)


def reordered(script, first, second, kind, variant):
    """Check that another order of sums is called that."""
    report = diff(script, ("--kind", kind), ("--kind", kind, "--variant", variant), (first, second))
    assert report.status == 0, report.text()
    assert report.kind_of_difference in ("order of sums", "none")
    assert report.own == []


def seeded(script, first, second, kind, variant, where):
    """Check that another computation is placed where it is."""
    report = diff(script, ("--kind", kind), ("--kind", kind, "--variant", variant), (first, second))
    assert (report.status, report.kind_of_difference) == (1, "another computation"), report.text()
    difference = report.verdict.first
    assert where in (difference.module, difference.name, difference.name.rpartition(".")[0]), report.text()


@pytest.mark.parametrize("case", [PROGRAMS.REORDERINGS[place] for place in (2, 7, 10)], ids=str)
def test_another_order_of_sums_is_no_difference(script, case):
    """Other numbers of ranks, and sums cut in two, round otherwise: status 0."""
    reordered(script, *case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", PROGRAMS.REORDERINGS, ids=str)
def test_no_reordering_is_called_a_bug(script, case):
    """None of 30 pairs that compute the same in another order is a difference."""
    reordered(script, *case)


@pytest.mark.parametrize("case", [PROGRAMS.SEEDED[place] for place in (1, 8, 12)], ids=str)
def test_another_computation_is_placed(script, case):
    """The first value that differs is that of the module which computes something else."""
    seeded(script, *case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", PROGRAMS.SEEDED, ids=str)
def test_every_seeded_pair_is_placed(script, case):
    """All of 15 pairs that compute something else are found, each at its module."""
    seeded(script, *case)


def test_equal_runs_have_equal_bits(script):
    """The same run twice differs in no bit, which the report says."""
    report = diff(script)
    assert (report.status, report.kind_of_difference, report.first_bits) == (0, "none", "")
    assert "all bits are equal" in report.text()


@pytest.mark.parametrize(
    "option, cause, kind", [("--seed", "other-weights", "weight"), ("--data", "other-samples", "input")]
)
def test_another_start_is_said_first(script, option, cause, kind):
    """Other initial weights and other samples are the only difference that is reported."""
    report = diff(script, (), (option, "5"), (1, 2))
    assert (report.status, report.kind_of_difference) == (1, "another start")
    assert {difference.kind for difference in report.verdict.differences} == {kind}
    assert report.verdict.first.cause.kind == cause
    assert report.json()["difference"] == "another start"


def test_another_learning_rate_is_no_count(script):
    """Twice the learning rate is a setting: no count of samples is named as its cause."""
    first = diff(script, (), ("--variant", "double_rate")).verdict.first
    assert (first.kind, first.cause.kind) == ("rate", "unexplained")


def test_a_is_compared_as_it_is(script):
    """Runs that share a bug of A's ranks are equal to each other; that A is not what it is on one rank is noted."""
    wrong = ("--kind", "dp", "--variant", "not_averaged")
    report = diff(script, wrong, wrong, (2, 2))
    assert report.status == 0, report.text()
    assert report.own[0].startswith("A's own ranks are not equal to A on one rank, first in step 1: the gradient of ")


def test_a_rank_that_fails_is_in_the_report(script):
    """A failure of B's ranks, or of A's, is status 1 with the rank's error."""
    failing = Path(script).with_name("fails.py")
    failing.write_text(PROGRAMS.SCRIPT + "\nif world == 2:\n    raise RuntimeError('rank ' + str(rank))\n")
    for sides, name in (((script, failing), "B"), ((failing, script), "A")):
        first, second = (DiffSide(str(path), (), 2, "threads") for path in sides)
        report = verify_diff(first, second)
        assert (report.status, report.failed_run, report.cause) == (1, name, "RuntimeError: rank 0")
        assert f"FAILED in {name}: RuntimeError: rank 0" in report.text()
        assert report.json()["difference"] == "failed"


def test_runs_without_a_common_name_are_refused(script):
    """Two models without a common parameter: the message has the names of both."""
    other = Path(script).with_name("other.py")
    other.write_text(
        "import torch\nmodel = torch.nn.Sequential()\nmodel.add_module('entry', torch.nn.Linear(3, 2))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(2, 3)).sum().backward()\noptimizer.step()\n"
    )
    with pytest.raises(InputError) as refused:
        verify_diff(DiffSide(str(other), (), 1, "threads"), DiffSide(script, (), 1, "threads"))
    assert str(refused.value) == (
        "A and B share no parameter and no recorded value, so nothing can be compared: A has entry.bias, entry.weight; "
        "B has blocks.0.down.bias, blocks.0.down.weight, blocks.0.norm.weight, blocks.0.up.bias; did you mean "
        "enter.bias?"
    )


def test_a_run_that_cannot_be_one_rank_names_the_option(script):
    """A's ranks are put together by its run on one rank; --a-single-args says how that is started."""
    picky = Path(script).with_name("picky.py")
    seeds = "torch.manual_seed(given.seed)"
    picky.write_text(PROGRAMS.SCRIPT.replace(seeds, "assert world == 2 or given.seed == 7\ntorch.manual_seed(0)"))
    with pytest.raises(InputError, match="If it needs other arguments there, give them with --a-single-args ARGS"):
        verify_diff(DiffSide(str(picky), (), 2, "threads"), DiffSide(str(picky), (), 2, "threads"))
    first = DiffSide(str(picky), (), 2, "threads", single_args=("--seed", "7"))
    assert verify_diff(first, DiffSide(str(picky), (), 2, "threads")).status == 0


@pytest.mark.parametrize(
    "options, said",
    [
        ({"steps": 0}, "--steps is 0; at least one step must be compared"),
        ({"sizes": (0, 1)}, "--a-world-size is 0; a world has at least one rank"),
    ],
)
def test_wrong_numbers_are_refused(script, options, said):
    """Numbers that make no run are named with their option."""
    with pytest.raises(InputError) as refused:
        diff(script, **options)
    assert str(refused.value) == said


def test_a_compiler_that_was_kept_from_compiling_is_no_proof(script):
    """Recorded modules run uncompiled: equal runs are status 3, since nothing was found out about the compiler."""
    compiled = Path(script).with_name("compiled.py")
    compiled.write_text(PROGRAMS.SCRIPT.replace("model = Model()", "model = torch.compile(Model(), backend='eager')"))
    report = verify_diff(DiffSide(script), DiffSide(str(compiled)))  # forked ranks: the compiler counts per process
    assert report.status == 3, report.text()
    assert "INCONCLUSIVE: B asked for compiled functions, and recorded modules run uncompiled" in report.text()


def test_ranks_of_a_that_differ_from_a_on_one_rank_are_noted(script):
    """B is compared with A's ranks as they are, and the report says that these are not equal to A on one rank."""
    report = diff(
        script, ("--kind", "tp", "--variant", "no_reduce"), ("--kind", "tp", "--variant", "no_reduce"), (2, 2)
    )
    (note,) = report.own[:1]
    assert note.startswith("A's own ranks are not equal to A on one rank, first ")
    assert note.endswith("B is compared with A's ranks as they are; hyper-parallel verify program says why")


SMALL = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(time.time_ns() if "--unseeded" in sys.argv else 0)
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.arange(30.0).view(6, 5).sin().chunk(world)[rank]
model(rows).square().mean().backward()
for parameter in model.parameters():
    if not ("--alone" in sys.argv and rank):
        dist.all_reduce(parameter.grad)
    parameter.grad /= world
optimizer.step()
"""


def test_ranks_of_b_that_call_different_things_are_a_difference(tmp_path):
    """A collective that one rank of B leaves out ends the run, and the report says so."""
    (tmp_path / "train.py").write_text(SMALL)
    report = diff(str(tmp_path / "train.py"), (), ("--alone",), (1, 2))
    assert (report.status, report.kind, report.failed_run) == (1, "unequal-calls", "B")


def test_a_run_that_is_not_deterministic_is_refused(tmp_path):
    """A on one rank is repeated; where that gives other numbers, nothing is compared with it."""
    (tmp_path / "train.py").write_text(SMALL)
    with pytest.raises(InputError) as caught:
        diff(str(tmp_path / "train.py"), ("--unseeded",), ("--unseeded",))
    assert "A runs on one rank, too" not in str(caught.value)
