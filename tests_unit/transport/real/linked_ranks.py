"""A rank on one of two hosts, run by ``test_cut_link.py`` with a case, a folder for what became of it, and a limit."""

import json
import os
import pathlib
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import hyper_parallel

case, folder, seconds = sys.argv[1], pathlib.Path(sys.argv[2]), float(sys.argv[3])
rank = int(os.environ["RANK"])


def meet(name):
    """Return once all ranks are here and the test goes on."""
    (folder / f"{rank}.{name}").touch()
    while not (folder / f"all.{name}").exists():
        time.sleep(0.02)


def talk(platform, number):
    """A collective, a message from host to host, and whether both were right."""
    total = platform.all_reduce(torch.full((3,), float(rank + number)))
    last = dist.get_world_size() - 1
    if rank == 0:
        platform.isend(torch.full((2,), float(number)), last).wait()
    received = platform.irecv(torch.empty(2), 0).wait() if rank == last else None
    right = total.tolist() == [3.0 + 3 * number] * 3
    return right and (received is None or received.tolist() == [number] * 2)


BUILDS = {
    "group": lambda platform: platform.create_group([0, 2]),
    "new_group": lambda _: dist.new_group([0, 2], timedelta(seconds=seconds), use_local_synchronization=True),
}


def lose(platform):
    """Call what the link is cut in."""
    if case == "message" and rank != 1:
        return platform.isend(torch.ones(2), 2).wait() if rank == 0 else platform.irecv(torch.ones(2), 0).wait()
    if case == "started":
        return platform.all_reduce(torch.ones(3), async_op=True)[1].wait()
    if case == "in a group" and rank != 1:
        return platform.all_reduce(torch.ones(3), platform.create_group([0, 2]))
    if case in BUILDS and rank != 1:
        return BUILDS[case](platform)
    if case == "barrier":
        return platform.barrier()
    return platform.all_reduce(torch.ones(3))


def run():
    """Take part; return whether every value was right."""
    platform = hyper_parallel.get_platform()
    meet("imported")
    platform.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    if case == "in a group" and rank != 1:
        platform.create_group([0, 2])
    right = [talk(platform, number) for number in range(2 if case == "slow" else 1)]
    if case != "slow":
        meet("joined")
        lose(platform)
    platform.destroy_process_group()
    return all(right)


try:
    outcome = {"right": run()}
except Exception as error:  # noqa: BLE001 - shown
    outcome = {"error": f"{type(error).__name__}: {error}"}
(folder / f"{rank}.json").write_text(json.dumps(outcome))
