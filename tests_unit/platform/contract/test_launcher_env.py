"""Ranks as launchers number them, by the environment variables of torchrun and msrun."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import MeshError, WorldNotJoinedError
from hyper_parallel.platform.contract.launcher_env import LaunchedRank, launched_rank
from hyper_parallel.platform.select import platform_named

pytestmark = pytest.mark.platforms("torch", "mindspore")

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
MSRUN = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "3", "MS_SCHED_HOST": "10.0.0.1", "MS_SCHED_PORT": "8118"}
ASKED = dict.fromkeys(("rank", "world_size", "init_method", "store"))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Take the variables of a launcher that started the tests away."""
    for name in (*TORCHRUN, *MSRUN, "RANK_ID"):
        monkeypatch.delenv(name, raising=False)


def launch(monkeypatch, variables):
    """Set the variables, and return what they mean."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return launched_rank()


@pytest.mark.parametrize(
    "variables, launched, text",
    [
        (TORCHRUN, LaunchedRank(1, 3, "RANK, WORLD_SIZE"), "rank 1 of 3 (RANK, WORLD_SIZE)"),
        (
            {**MSRUN, "RANK_ID": "2"},
            LaunchedRank(2, 3, "RANK_ID, MS_WORKER_NUM", "tcp://10.0.0.1:8118"),
            "rank 2 of 3 (RANK_ID, MS_WORKER_NUM)",
        ),
        (
            MSRUN,
            LaunchedRank(None, 3, "RANK_ID, MS_WORKER_NUM", "tcp://10.0.0.1:8118"),
            "one of 3 ranks (RANK_ID, MS_WORKER_NUM)",
        ),
        (
            {**MSRUN, "MS_ROLE": "MS_SCHED", "RANK_ID": "0", "MS_WORKER_NUM": "1"},
            LaunchedRank(0, 1, "RANK_ID, MS_WORKER_NUM", "tcp://10.0.0.1:8118", scheduler=True),
            "the scheduler of 1 ranks (MS_ROLE)",
        ),
    ],
)
def test_what_a_launcher_says_is_read(monkeypatch, variables, launched, text):
    """Rank, number of ranks and meeting place are those of torchrun or msrun; msrun may leave the rank open."""
    assert launch(monkeypatch, variables) == launched
    assert str(launched) == text


@pytest.mark.parametrize("variables", [{**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
                                       {**MSRUN, "MS_WORKER_NUM": "1", "RANK_ID": "0"},
                                       {"RANK_ID": "0", "RANK_SIZE": "8"}])  # fmt: skip
def test_a_single_rank_has_no_launcher(monkeypatch, variables):
    """A world of one needs no joining, and variables of a cluster's scheduler are those of no launcher."""
    assert launch(monkeypatch, variables) is None


@pytest.mark.parametrize("variables", [{**TORCHRUN, "WORLD_SIZE": "first"}, {**MSRUN, "RANK_ID": "first"}])
def test_numbers_that_are_none_are_refused(monkeypatch, variables):
    """A rank or a world size that is not a number is said, instead of being taken for a world of one."""
    with pytest.raises(MeshError) as raised:
        launch(monkeypatch, variables)
    name = next(name for name, value in variables.items() if value == "first")
    assert str(raised.value) == f"{name} is 'first': a launcher sets it to an integer"


def test_a_rank_of_msrun_that_has_not_joined_is_no_world_of_one(monkeypatch, platform_name):
    """Rank and world size are those of msrun, and communication is refused until the world is joined."""
    launch(monkeypatch, {**MSRUN, "RANK_ID": "2"})
    platform = platform_named(platform_name)
    assert (platform.get_rank(), platform.get_world_size(), platform.has_world()) == (2, 3, False)
    with pytest.raises(WorldNotJoinedError) as raised:
        platform.barrier()
    assert str(raised.value) == (
        "a launcher started this process as rank 2 of 3 (RANK_ID, MS_WORKER_NUM), and it has not joined their world: "
        "make the mesh with init_device_mesh, or call get_platform().init_process_group(), first"
    )


def test_a_rank_that_msrun_did_not_number_is_told_how(monkeypatch, platform_name):
    """Without RANK_ID the number of ranks is known and the rank is not; a world over gloo cannot be joined."""
    launch(monkeypatch, MSRUN)
    platform = platform_named(platform_name)
    assert platform.get_world_size() == 3
    with pytest.raises(WorldNotJoinedError, match=r"^a launcher started this process as one of 3 ranks \(RANK_ID, "):
        platform.get_rank()
    with pytest.raises(MeshError) as raised:
        platform.join_launched_world("cpu")
    assert str(raised.value) == ("init_process_group: msrun set no RANK_ID; start it with --node_rank on each machine")


def test_the_scheduler_of_msrun_ends_where_it_would_join(monkeypatch, platform_name):
    """The process beside the ranks runs the script up to the first mesh, and ends with status 0."""
    launch(monkeypatch, {**MSRUN, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"})
    with pytest.raises(SystemExit) as ended:
        platform_named(platform_name).join_launched_world("cpu")
    assert ended.value.code == 0


def test_the_program_goes_before_msrun(monkeypatch, platform_name):
    """What the program gives itself is not taken from the environment, and only gloo needs it from there."""
    launch(monkeypatch, {**MSRUN, "RANK_ID": "2"})
    launched = platform_named(platform_name)._launched
    address = {"init_method": "tcp://10.0.0.1:8118"}
    assert launched("gloo", ASKED) == {"rank": 2, "world_size": 3, **address}
    assert launched("gloo", {**ASKED, "rank": 1}) == {"world_size": 3, **address}
    assert launched("gloo", {**ASKED, "init_method": "env://"}) == launched("hccl", ASKED) == {}
