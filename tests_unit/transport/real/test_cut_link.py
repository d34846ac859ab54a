"""A cut or slow link between two hosts: the ranks end, and say who cannot be reached."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyper_parallel.transport.processes import search_path
from hyper_parallel.transport.simulated.rank_pool import LEDGER_VARIABLE

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.fault]

SCRIPT = Path(__file__).with_name("linked_ranks.py")
HOST_OF = (0, 0, 1)
"""The host of each rank."""
LIMIT = 240


@pytest.fixture
def hosts(load_file):
    """Two connected hosts."""
    made = load_file(Path(__file__).with_name("two_hosts.py"))
    with contextlib.ExitStack() as stack:
        try:
            pair = stack.enter_context(made.two_hosts())
        except made.NotPermittedError as error:
            pytest.skip(f"network namespaces: {error}")
        pair.addresses = made.ADDRESSES
        yield pair


def started(hosts, case, folder, seconds):
    """The processes of three ranks, two of them on the first host."""
    environment = {name: value for name, value in os.environ.items() if name != LEDGER_VARIABLE}
    environment |= {"PYTHONPATH": os.pathsep.join(search_path()), "HYPER_PARALLEL_PLATFORM": "torch"}
    environment |= {"WORLD_SIZE": "3", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500"}
    environment |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            hosts.command(host, sys.executable, str(SCRIPT), case, str(folder), str(seconds)),
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
            stdout=subprocess.DEVNULL, stderr=(folder / f"{rank}.errors").open("w"),
        )
        for rank, host in enumerate(HOST_OF)
    ]  # fmt: skip


def come(processes, folder, name):
    """Wait until all ranks are at a place; False if one has ended."""
    deadline = time.monotonic() + LIMIT
    while len(list(folder.glob(f"[0-9].{name}"))) < len(processes):
        if any(process.poll() is not None for process in processes):
            return False
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return True


def outcomes(hosts, case, folder, seconds):
    """What became of each rank, all of which have ended by themselves; None if they did not join in so many seconds."""
    folder.mkdir()
    processes = started(hosts, case, folder, seconds)
    try:
        for name in ("imported", "joined") if case in CALLS else ("imported",):
            if not come(processes, folder, name):
                return None
            if case != "slow" and (name == "joined" or case == "start"):
                hosts.cut()
            (folder / f"all.{name}").touch()
        for process in processes:
            process.wait(LIMIT)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def errors_of(hosts, case, folder):
    """The error of each rank; ranks get the time that they need to join."""
    seconds, ended = 5.0, None
    while ended is None:
        ended = outcomes(hosts, case, folder / str(seconds), seconds)
        seconds *= 2
        assert ended or seconds < LIMIT, [path.read_text()[-2000:] for path in folder.rglob("*.errors")]
    return [outcome["error"] for outcome in ended]


CALLS = {
    "group": [
        "building the group of ranks (0, 2) at ",
        "all_gather of ranks",
        "building the group of ranks (0, 2) at ",
    ],
    "new_group": [
        "building the group of ranks (0, 2) at ",
        "all_gather of ranks",
        "building the group of ranks (0, 2) at ",
    ],
    "in a group": ["all_gather of ranks (0, 2) at ", "all_gather of ranks", "all_gather of ranks (0, 2) at "],
    "collective": ["all_gather of ranks (0, 1, 2) at "] * 3,
    "message": ["send: f32[2] to rank 2 (tag 0) at ", "all_gather of ranks", "recv: f32[2] from rank 0 (tag 0) at "],
    "started": ["all_gather of ranks", "all_gather of ranks", "start of a collective of ranks (0, 1, 2) at "],
    "barrier": ["all_gather of ranks (0, 1, 2) at "] * 3,
}


REASONS = ("gloo:", "the world's store:", "the world's store gave no answer within", "the group was not built within")


@pytest.mark.parametrize(
    "case",
    ["message", pytest.param("group", marks=pytest.mark.sweep),
     pytest.param("new_group", marks=pytest.mark.sweep),
     pytest.param("collective", marks=pytest.mark.sweep), pytest.param("started", marks=pytest.mark.sweep),
     pytest.param("in a group", marks=pytest.mark.sweep), pytest.param("barrier", marks=pytest.mark.sweep)],
)  # fmt: skip
def test_a_link_that_is_cut_is_named_on_both_sides(hosts, tmp_path, case):
    """Ranks that are cut off end at the limit; each names the host that it cannot reach, its call and its line."""
    errors = errors_of(hosts, case, tmp_path)
    line = f"{SCRIPT}:"
    first = hosts.addresses[0]
    for rank, (error, call) in enumerate(zip(errors, CALLS[case], strict=True)):
        assert error.startswith(f"RankFailedError: {call}"), error
        assert line in error.splitlines()[0], error
        assert f": rank {rank} " in error.splitlines()[0]
        assert any(f"\n  {reason} " in error for reason in REASONS), error
    for rank in (0, 1) if case != "message" else (0,):
        assert "\n  rank 2 does not answer; its host " in errors[rank]
        assert " cannot be reached, or the rank has ended, is stopped, or does something else" in errors[rank]
    assert f"\n  the store of the world at {first}:29500 cannot be reached from host " in errors[2]
    assert "\n  nothing is known of rank" in errors[2]


@pytest.mark.sweep
def test_a_link_that_is_cut_during_the_start_is_named(hosts, tmp_path):
    """No rank waits longer than its limit for the others; who cannot reach whom is named with the address."""
    errors = errors_of(hosts, "start", tmp_path)
    for rank, error in enumerate(errors):
        assert error.startswith(f"RendezvousError: init_process_group: rank {rank} on host ")
        assert " did not meet the other ranks: " in error
    assert "/3 clients joined. start the others, and look at their output and at the links to their hosts" in errors[0]
    assert f"while trying to connect to ({hosts.addresses[0]}, 29500). start rank 0 there" in errors[2]


@pytest.mark.sweep
def test_a_slow_link_raises_no_alarm(hosts, tmp_path):
    """Over a link that is there for two thirds of the time, every value is right and nobody is told of anything."""
    hosts.slow()
    assert outcomes(hosts, "slow", tmp_path / "slow", 600.0) == [{"right": True}] * 3
