"""Random training programs with checkpoints and restarts, for ``--minutes``, 30 without it.

Each program trains without an interruption, then again up to a checkpoint, where its world ends or loses a rank, and
goes on from the checkpoint in a new world. In a world of the same size every loss and every weight must be equal bit
for bit; in one of another size the losses may be off by what rounding does to them, which runs with weights moved in
the last place show. What this process uses is compared as in ``soak.py``. ``test_soak_training.py`` runs short forms.
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from hyper_parallel.errors import RankFailedError
from hyper_parallel.verify.engine.noise import MULTIPLE
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

PLANS = (
    "tensor parallel",
    "sequence parallel",
    "PyTorch's tensor parallel",
    "fully_shard",
    "fully_shard and tensor parallel",
    "DDP",
)
OURS = PLANS[:2]
OPTIMIZERS = ("SGD", "AdamW", "Adam", "Adagrad", "RMSprop")
ROWS = 12  # of a batch: as many for each rank in worlds of 2, 3 and 4


class Case(NamedTuple):
    """A training program, its checkpoint and its restart."""

    seed: int
    real: bool
    plan: str
    size: int
    later: int
    """Size of the world that goes on."""
    optimizer: str
    foreach: bool
    width: int
    hidden: int
    dropout: float
    dtype: str
    files: str
    """How it saves: ``torch.save`` by each rank, ``DCP``, or ``full`` values by rank 0."""
    saved: int
    """The step after which it saves."""
    lost: int
    """The step in which a rank is lost; as many as there are steps if the world ends by itself."""
    steps: int


def draw(seed, *, real=None):
    """Return the case of a seed."""
    drawn = random.Random(seed)  # noqa: S311 - no secret
    plan = drawn.choice(PLANS)
    size = 4 if plan == PLANS[4] else drawn.choice((2, 3, 4))
    other = drawn.random() < 0.3 and plan != PLANS[4]
    later = drawn.choice([n for n in (1, 2, 3, 4) if n != size]) if other else size
    steps = drawn.randrange(4, 9)
    saved = drawn.randrange(1, steps - 1)
    whole = "full" if plan in OURS else "DCP"
    even = plan not in OURS and "tensor parallel" in plan
    return Case(
        seed=seed,
        real=drawn.random() < 0.08 if real is None else real,
        plan=plan,
        size=size,
        later=later,
        optimizer=drawn.choice(OPTIMIZERS),
        # PyTorch's foreach optimizers refuse the plain and distributed parameters of its tensor parallelism together.
        foreach=drawn.random() < 0.5 and plan != PLANS[2],
        width=2 * drawn.randrange(2, 6),
        hidden=12 if even else drawn.randrange(4, 14),
        dropout=0.0 if other and plan not in OURS else drawn.choice((0.0, 0.3)),
        dtype=drawn.choice(("float32", "float64")),
        files=whole if other else drawn.choice(("torch.save", whole)),
        saved=saved,
        lost=drawn.randrange(saved + 1, steps + 1),
        steps=steps,
    )


# -- on a rank ---------------------------------------------------------------------------------------------------------


def network(case):
    """Return the network on one device: a norm, two linear layers, dropout between them."""
    import torch

    torch.manual_seed(case.seed)
    parts = collections.OrderedDict(
        norm=torch.nn.LayerNorm(case.width), up=torch.nn.Linear(case.width, case.hidden), act=torch.nn.GELU(),
        drop=torch.nn.Dropout(case.dropout), down=torch.nn.Linear(case.hidden, case.width),
    )  # fmt: skip
    return torch.nn.Sequential(parts).to(getattr(torch, case.dtype))


def parallelized(case, model):
    """Return the network on its ranks, and the mesh (PyTorch's plans have their own)."""
    import torch
    from torch.distributed import device_mesh, fsdp
    from torch.distributed.tensor import parallel

    import hyper_parallel as hp
    from hyper_parallel.platform.torch.pytorch_data_parallel import rank_order_hook

    size = torch.distributed.get_world_size()
    if case.plan in OURS:
        mesh = hp.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        plan = {"up": hp.ColwiseParallel(use_local_output=False), "down": hp.RowwiseParallel()}
        if case.plan == "sequence parallel":
            plan["norm"] = hp.SequenceParallel()
            plan["up"] = hp.ColwiseParallel(input_layouts=hp.Shard(1), use_local_output=False)
        hp.manual_seed(case.seed)
        return hp.parallelize_module(model, mesh, plan), mesh
    if case.plan == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, rank_order_hook)  # gloo's own order changes when DDP rebuilds its buckets
        return model, None
    two = case.plan == "fully_shard and tensor parallel"
    shape, names = ((2, 2), ("dp", "tp")) if two else ((size,), ("all",))
    mesh = device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    if case.plan != "fully_shard":
        plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
        model = parallel.parallelize_module(model, mesh["tp"] if two else mesh, plan)
    if case.plan != "PyTorch's tensor parallel":
        fsdp.fully_shard(model, mesh=mesh["dp"] if two else mesh)
    return model, mesh


def batch(case, step, mesh):
    """Return this rank's part of the batch of a step."""
    import torch

    import hyper_parallel as hp

    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    x = torch.randn(ROWS, 5, case.width, generator=generator, dtype=torch.float64).to(getattr(torch, case.dtype))
    if case.plan == "sequence parallel":
        return hp.distribute_tensor(x, mesh, [hp.Shard(1)]), x.square()
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if case.plan == "fully_shard and tensor parallel":
        size, rank = 2, rank // 2
    if case.plan in ("DDP", "fully_shard", "fully_shard and tensor parallel"):
        x = x.chunk(size)[rank]
    return x, x.square()


def random_state():
    """Return the states of the generators of this rank."""
    import torch

    from hyper_parallel.core.dtensor import random as random_of_dtensors

    return {"torch": torch.get_rng_state(), "dtensors": random_of_dtensors.get_rng_state()}


def save(case, folder, model, optimizer):
    """Write a checkpoint of this rank's world."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    rank = torch.distributed.get_rank()
    torch.save(random_state(), folder / f"random-{rank}")
    if case.files == "torch.save":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"state-{rank}")
    elif case.files == "DCP":
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "dcp")
    else:
        whole = mapped(lambda x: x.full_tensor(), {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if rank == 0:
            torch.save(whole, folder / "full")
    torch.distributed.barrier()


def mapped(change, value):
    """Return nested dicts and lists with ``change`` of each DTensor of ours."""
    import hyper_parallel as hp

    if isinstance(value, dict):
        return {key: mapped(change, item) for key, item in value.items()}
    return change(value).detach() if isinstance(value, hp.DTensor) else value


def load(case, folder, model, optimizer):
    """Read a checkpoint, in a world of any size if its files allow it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import hyper_parallel as hp
    from hyper_parallel.core.dtensor import random as random_of_dtensors

    rank = torch.distributed.get_rank()
    if case.files == "torch.save":
        states = torch.load(folder / f"state-{rank}")
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
    elif case.files == "DCP":
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "dcp")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    else:
        states = torch.load(folder / "full")
        own = dict(model.named_parameters())

        def like(name, x):
            if not isinstance(own[name], hp.DTensor):  # in a world of one rank
                return x
            return hp.distribute_tensor(x, own[name].device_mesh, own[name].placements)

        model.load_state_dict({name: like(name, x) for name, x in states["model"].items()})
        for number, name in enumerate(own):
            slots = states["optimizer"]["state"].get(number, {})
            slots.update({slot: like(name, x) for slot, x in slots.items() if x.ndim})
        optimizer.load_state_dict(states["optimizer"])
    at = torch.load(folder / f"random-{rank % case.size}")
    torch.set_rng_state(at["torch"])
    random_of_dtensors.set_rng_state(at["dtensors"])


def train(case, folder, first, last, checkpoint=False, lost=None, nudge=0):
    """Train from step ``first`` up to ``last`` on this rank; return losses, and a digest of this rank's weights.

    Args:
        case: the program.
        folder: of the checkpoint, from which steps after the first go on.
        first: the step to begin with.
        last: the step before which to end.
        checkpoint: whether to save after the case's step.
        lost: the step in which rank 1 is lost.
        nudge: +1 or -1 moves the loaded weights in the last place.
    """
    import torch

    import hyper_parallel as hp

    model, mesh = parallelized(case, network(case))
    options = {"momentum": 0.9} if case.optimizer == "SGD" else {}
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=1e-2, foreach=case.foreach, **options)
    rank = torch.distributed.get_rank()
    torch.manual_seed(case.seed + rank)
    if first:
        load(case, folder, model, optimizer)
    if nudge:
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + nudge * torch.finfo(weight.dtype).eps)
    losses = []
    for step in range(first, last):
        x, y = batch(case, step, mesh)
        output = model(x)
        output = output.full_tensor() if isinstance(output, hp.DTensor) else output
        loss = (output - y).square().mean()
        loss.backward()
        if step == lost and rank == 1:
            lose(case)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(global_loss(loss.detach()))
        if checkpoint and step == case.saved:
            save(case, folder, model, optimizer)
    return losses, digest(model)


def lose(case):
    """End this rank: by a signal where it is a process."""
    if case.real:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("lost")


def global_loss(loss):
    """Return the mean of the ranks' losses, added in the order of the ranks."""
    import torch

    parts = [torch.empty_like(loss) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, loss)
    return float(sum(parts) / len(parts))


def digest(model):
    """Return a digest of all bytes of this rank's weights."""
    total = hashlib.sha256()
    for name, weight in model.named_parameters():
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        total.update(name.encode() + local.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


# -- in the process that starts them -----------------------------------------------------------------------------------


def check(case):
    """Run a case; return what differs, in words, empty if nothing does."""
    start = functools.partial(launch if case.real else simulate, timeout=600)
    with tempfile.TemporaryDirectory(prefix="soak") as name:
        folder = Path(name)
        whole = start(train, case.size, "torch", (case, folder, 0, case.steps))
        interrupted = (case, folder, 0, min(case.lost + 1, case.steps), True, case.lost)
        try:
            start(train, case.size, "torch", interrupted)
        except RankFailedError as error:
            if case.lost == case.steps or "rank 1" not in str(error):
                raise
        else:
            if case.lost < case.steps:
                return "the world has not noticed that rank 1 is lost"
        first = case.saved + 1
        after = start(train, case.later, "torch", (case, folder, first, case.steps))
        if case.later == case.size:
            return unequal(whole, after, first)
        later = functools.partial(start, train, case.later, "torch")
        nudged = [later((case, folder, first, case.steps, False, None, sign))[0][0] for sign in (1, -1)]
        return beyond(whole[0][0][first:], after[0][0], nudged, case.dtype)


def unequal(whole, after, first):
    """Return which ranks have other losses or weights."""
    differing = [rank for rank, run in enumerate(zip(whole, after, strict=True))
                 if run[0][0][first:] != run[1][0] or run[0][1] != run[1][1]]  # fmt: skip
    return f"ranks {differing} have other losses or weights after the restart" if differing else ""


def beyond(expected, actual, nudged, dtype):
    """Return the losses that are off by more than rounding does to them."""
    unit = 2.0**-23 if dtype == "float32" else 2.0**-52
    moved = [max(abs(one - x) for one in ones) for x, *ones in zip(actual, *nudged, strict=True)]
    return "; ".join(
        f"loss {number} is {x!r}, not {right!r}"
        for number, (x, right, by) in enumerate(zip(actual, expected, moved, strict=True))
        if not abs(x - right) <= MULTIPLE * max(by, unit * abs(right))
    )


def main(arguments):
    """Run cases until the time is over or their number is reached; return 1 if one differs or the process grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--programs", type=int, default=sys.maxsize)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simulated", action="store_true", help="no real processes")
    options = parser.parse_args(arguments)
    return run(options)


def run(options):
    """Run the programs of the options, and print each difference and the counts."""
    import torch
    from soak import grown, usage

    torch.set_num_threads(1)
    counts, status, before = collections.Counter(), 0, None
    begun = time.monotonic()
    end = begun + 60 * options.minutes
    while time.monotonic() < end and counts["programs"] < options.programs:
        case = draw(options.seed + counts["programs"], real=False if options.simulated else None)
        try:
            difference = check(case)
        except RankFailedError as error:
            difference = str(error)
        counts.update(counted(case))
        if difference:
            status = 1
            print(f"{case}: {difference}", flush=True)
        share = max((time.monotonic() - begun) / (60 * options.minutes), counts["programs"] / options.programs)
        if before is None and share > 0.1:
            before = usage()
        if counts["programs"] % 50 == 0:
            print(f"{time.monotonic() - begun:.0f} s: {dict(sorted(counts.items()))}, {usage()}", flush=True)
    after = usage()
    print(dict(sorted(counts.items())))
    print(f"{before} -> {after}: {grown(before, after) or 'flat'}")
    return status | bool(grown(before, after))


def counted(case):
    """Return the counts that a case adds to."""
    yield "programs"
    yield f"plan: {case.plan}"
    yield f"files: {case.files}"
    yield "real processes" if case.real else "simulated ranks"
    yield "another world size" if case.later != case.size else "equal bit for bit"
    yield "rank lost" if case.lost < case.steps else "world ended"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
