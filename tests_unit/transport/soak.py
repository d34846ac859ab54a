"""Long runs of ranks, to see that memory, threads and descriptors stay flat: ``python tests_unit/transport/soak.py``.

Each load runs on ranks of one kind. A tenth of its rounds is warm-up; what the process of a rank uses then is compared
with what it uses at the end. ``test_soak.py`` runs a short form of every load.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

MEMORY = 32 << 20
"""Bytes that a process may grow by: the allocator keeps what it had at its peak."""


class Usage(NamedTuple):
    """What a process uses: bytes of memory, threads, and open descriptors."""

    memory: int
    threads: int
    descriptors: int


def usage():
    """Return what this process uses."""
    gc.collect()
    process = Path("/proc/self")
    pages = int((process / "statm").read_text().split()[1])
    descriptors = len(list((process / "fd").iterdir()))
    return Usage(pages * os.sysconf("SC_PAGE_SIZE"), threading.active_count(), descriptors)


def settled(before):
    """Return what this process uses, once it is no more than ``before`` or 10 s have passed: sockets close later."""
    now = usage()
    for _ in range(100):
        if before is None or (now.threads <= before.threads and now.descriptors <= before.descriptors):
            break
        time.sleep(0.1)
        now = usage()
    return now


def repeat(round_, rounds):
    """Call ``round_(number)`` ``rounds`` times, and return what rank 0's process uses after a tenth and at the end."""
    import torch.distributed as dist

    samples = []
    for number in range(rounds):
        round_(number)
        if number + 1 in (max(rounds // 10, 1), rounds):
            dist.barrier()  # all ranks are between two rounds
            samples.append(settled(samples[0] if samples else None) if dist.get_rank() == 0 else None)
            dist.barrier()
    return samples


def collectives(rounds):
    """All-reduce, all-gather and a message around the ring, checked in every round."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    # PyTorch 2.13 renamed it
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

    def round_(number):
        total = torch.tensor([rank + number, 1])
        dist.all_reduce(total)
        assert total.tolist() == [size * (size - 1) // 2 + size * number, size]
        gathered = torch.empty(size, dtype=torch.long)
        gather(gathered, torch.tensor([rank * number]))
        assert gathered[-1] == (size - 1) * number
        received = torch.empty(1, dtype=torch.long)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.tensor([rank]), (rank + 1) % size),
                dist.P2POp(dist.irecv, received, (rank - 1) % size),
            ]
        )
        for work in works:
            work.wait()
        assert received.item() == (rank - 1) % size

    return repeat(round_, rounds)


def groups(rounds):
    """A new group of half of the ranks, a sum over it, and its end, in every round."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()

    def round_(number):
        members = [member for member in range(size) if (member + number) % 2 == 0]
        group = dist.new_group(members)
        if rank in members:
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total.item() == len(members)
            dist.destroy_process_group(group)

    return repeat(round_, rounds)


def steps(rounds):
    """Training steps of a sharded network, new batch sizes included, with clipping and AdamW."""
    import torch

    from hyper_parallel import ColwiseParallel, RowwiseParallel, init_device_mesh, parallelize_module

    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 6))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)

    def round_(number):
        x = torch.randn(1 + number % 7, 6, generator=generator)
        loss = (model(x) - x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.isfinite()

    return repeat(round_, rounds)


LOADS = {
    "64 simulated ranks, collectives": (simulate, collectives, 64, 10_000),
    "16 real ranks, collectives": (launch, collectives, 16, 10_000),
    "64 simulated ranks, groups": (simulate, groups, 64, 1_000),
    "16 real ranks, groups": (launch, groups, 16, 1_000),
    "64 simulated ranks, training steps": (simulate, steps, 64, 1_000),
    "16 real ranks, training steps": (launch, steps, 16, 1_000),
    "4 simulated ranks, training steps": (simulate, steps, 4, 10_000),
    "2 real ranks, training steps": (launch, steps, 2, 10_000),
}
"""Each load: what starts its ranks, their body, how many there are, and rounds of the long form."""


def grown(before, after):
    """Return how a process has grown over its bound, in words; empty if it has not."""
    more = [
        f"{name} {was} -> {now}"
        for name, was, now, bound in zip(Usage._fields, before, after, (MEMORY, 0, 0), strict=True)
        if now > was + bound
    ]
    return ", ".join(more)


def main(arguments):
    """Run the loads whose name contains ``--only``, print what they use, and return 1 if one has grown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, help="instead of each load's own number")
    options = parser.parse_args(arguments)
    status = 0
    for name, (start, body, size, rounds) in LOADS.items():
        if options.only in name:
            before, after = start(body, size, "torch", (options.rounds or rounds,), timeout=4 * 3600)[0]
            status |= bool(grown(before, after))
            print(f"{name}: {before} -> {after}: {grown(before, after) or 'flat'}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
