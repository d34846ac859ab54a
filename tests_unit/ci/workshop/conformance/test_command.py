"""``python ci/workshop contract``: its checks, reports and refusals."""

import json

import pytest

from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.simulate import simulate
from workshop.commands import main
from workshop.conformance import results, suite
from workshop.conformance.inventory import MEMBERS
from workshop.conformance.world import ContractCheck, World


def ran(capsys, *arguments):
    """Return the exit status and the output."""
    status = main(["contract", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_facets_are_checked_and_written(platform_name, capsys, tmp_path):
    """Named facets are checked on every rank; the result is printed, and written as a file."""
    status, out, _ = ran(
        capsys, "--platform", platform_name, "--facet", "identity,pipeline", "--world-size", 2, "--report", tmp_path
    )
    assert status == 0, out
    assert out == f"{platform_name} / cpu / simulated, 2 ranks: 7 of 7 served\nseed 0\n"
    ((outcome,), _) = results.load(tmp_path)
    assert outcome.members == dict.fromkeys([*MEMBERS["identity"], *MEMBERS["pipeline"]], "served")


@pytest.mark.platforms("torch")
def test_a_failure_is_reported(capsys, monkeypatch):
    """A failing member is named with its failure, as text and as JSON, and the status is 1."""

    def fail(_):
        raise AssertionError("wrong")

    monkeypatch.setitem(suite.CHECKS, "pipeline", [ContractCheck(("micro_batch",), fail)])
    asked = ["--platform", "torch", "--facet", "pipeline", "--world-size", 2]
    status, out, _ = ran(capsys, *asked)
    assert status == 1
    assert "  micro_batch: failed: rank " in out
    status, out, _ = ran(capsys, *asked, "--json")
    document = json.loads(out)
    assert (status, document["ok"]) == (1, False)
    assert document["results"][0]["members"]["micro_batch"].endswith("AssertionError: wrong")


@pytest.mark.platforms("torch")
def test_memory_is_measured_where_asked(capsys, monkeypatch):
    """Memory figures are in the results on request; more than half of plain training's memory is a failure."""
    peaks = {"plain": 100, "checkpoint": 10, "swap": 51}
    built = {"parameters": 8 << 30, "seconds": 2.5, "grown": 1 << 20, "shard": 8 << 20, "filling": 9 << 20}
    monkeypatch.setattr(results, "measure", lambda platform: results.Footprint(platform, peaks, "today", built))
    status, out, _ = ran(capsys, "--platform", "torch", "--facet", "pipeline", "--world-size", 2, "--memory")
    assert status == 1
    assert out.splitlines()[-3:] == [
        "torch / cpu: activations in memory, of plain: plain 1.00, checkpoint 0.10, swap 0.51 (more than 0.50)",
        (
            "torch / cpu: 8.0 GiB of parameters over 8 simulated ranks are laid out in 2.50 s of computing, growing a "
            "process by 1.0 MiB; a shard of 8.0 MiB is filled in 9.0 MiB (more than 2 s)"
        ),
        "seed 0",
    ]


@pytest.mark.platforms("torch")
@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--facet", "tensor"], "--facet 'tensor' is not one of identity, groups, collectives, "),
        (["--launch", "threads"], "--launch 'threads' is not one of simulated, processes"),
        (["--platform", "jax"], "--platform 'jax' is not one of torch, mindspore"),
    ],
)
def test_input_that_makes_no_sense(capsys, arguments, text):
    """Invalid input gives exit status 2 and the accepted values."""
    status, _, err = ran(capsys, *arguments)
    assert status == 2
    assert text in err


@pytest.mark.platforms("torch")
def test_a_report_that_cannot_be_written(capsys, tmp_path):
    """A report that cannot be written is an error with path and reason before anything runs; status 2."""
    (tmp_path / "file").write_text("")
    asked = ["--platform", "torch", "--facet", "identity", "--world-size", 2, "--report", tmp_path / "file"]
    status, _, err = ran(capsys, *asked)
    assert status == 2
    assert (
        err
        == f"python ci/workshop: error: --report {tmp_path / 'file'} cannot be written: it is a file, not a folder\n"
    )


def test_the_seed_is_that_of_the_data(platform_name, capsys):
    """Two seeds give the checks other data, one seed the same; the report says which it was."""
    asked = ["--platform", platform_name, "--facet", "pipeline", "--json"]
    for seed in (0, 7):
        status, out, _ = ran(capsys, *asked, "--seed", seed)
        assert (status, json.loads(out)["header"]["seed"]) == (0, seed)
    samples = simulate(sampled, 2, platform_name, (0,)) + simulate(sampled, 2, platform_name, (7,))
    assert len({tuple(sample) for sample in samples}) == 4
    assert simulate(sampled, 2, platform_name, (7,)) == samples[2:]


def sampled(seed):
    """Return what a rank's world draws."""
    return World(current_platform(), seed).sample((5,)).tolist()
