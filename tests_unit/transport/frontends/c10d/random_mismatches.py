"""Random mistakes in collectives and messages of real ranks, each of which must be reported with both calls.

``python tests_unit/transport/frontends/c10d/random_mismatches.py --count 5000`` makes mistakes 0 to 4999 on warm worlds
of two to four ranks, and ends with the longest time until a rank was told.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import active_transport
from hyper_parallel.transport.checks.compare import ranked

FILE = __file__
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool, torch.complex64)
SUMMED = DTYPES[:3]
REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)


def line(function):
    """The place of a function of one line."""
    return f"{FILE}:{function.__code__.co_firstlineno}"


class Mistake(NamedTuple):
    """One case.

    Attributes:
        calls: per rank its function of one line and its arguments, or None.
        named: the ranks whose calls must be shown.
        what: a text that the error has.
    """

    calls: list
    named: tuple
    what: str


def make(draw, dtypes=DTYPES):
    """A tensor of a random shape, empty at times."""
    shape = [draw.randint(0 if draw.random() < 0.1 else 1, 5) for _ in range(draw.randint(1, 3))]
    return torch.ones(shape, dtype=draw.choice(dtypes))


def other_shape(x):
    """A tensor of another size and the same dtype."""
    return torch.ones(x.numel() + 3, dtype=x.dtype)


def other_dtype(x, dtypes):
    """A tensor of another dtype and the same shape."""
    return torch.ones(x.shape, dtype=next(dtype for dtype in dtypes if dtype != x.dtype))


def collective_calls(draw, x, size):
    """A collective of ``x`` and its mistaken forms: (text, function) each."""
    op = draw.choice(REDUCTIONS)
    wrong_op = next(other for other in REDUCTIONS if other != op)
    root = draw.randrange(size)
    wrong_root = (root + 1) % size
    tensor, longer, other = x.clone(), other_shape(x), other_dtype(x, SUMMED)
    options = {
        "all_reduce": (
            lambda: dist.all_reduce(tensor, op),
            ("shape", lambda: dist.all_reduce(longer, op)),
            ("dtype", lambda: dist.all_reduce(other, op)),
            ("reduction", lambda: dist.all_reduce(tensor, wrong_op)),
            ("operation", lambda: dist.broadcast(tensor, root)),
            ("operation", lambda: dist.barrier()),  # noqa: PLW0108 - its line is compared
        ),
        "broadcast": (
            lambda: dist.broadcast(tensor, root),
            ("shape", lambda: dist.broadcast(longer, root)),
            ("dtype", lambda: dist.broadcast(other, root)),
            ("src", lambda: dist.broadcast(tensor, wrong_root)),
            ("operation", lambda: dist.all_reduce(tensor, op)),
        ),
        "reduce": (
            lambda: dist.reduce(tensor, root, op),
            ("dst", lambda: dist.reduce(tensor, wrong_root, op)),
            ("reduction", lambda: dist.reduce(tensor, root, wrong_op)),
            ("dtype", lambda: dist.reduce(other, root, op)),
        ),
        "all_gather": (
            lambda: dist.all_gather([tensor.clone() for _ in range(size)], tensor),
            ("shape", lambda: dist.all_gather([longer.clone() for _ in range(size)], longer)),
            ("dtype", lambda: dist.all_gather([other.clone() for _ in range(size)], other)),
            ("operation", lambda: dist.barrier()),  # noqa: PLW0108 - its line is compared
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter(tensor.clone(), [tensor for _ in range(size)], op),
            ("shapes", lambda: dist.reduce_scatter(longer.clone(), [longer for _ in range(size)], op)),
            ("reduction", lambda: dist.reduce_scatter(tensor.clone(), [tensor for _ in range(size)], wrong_op)),
        ),
        "all_to_all": (
            lambda: dist.all_to_all([tensor.clone() for _ in range(size)], [tensor for _ in range(size)]),
            ("dtype", lambda: dist.all_to_all([other.clone() for _ in range(size)], [other for _ in range(size)])),
            ("operation", lambda: dist.broadcast_object_list([0], root)),
        ),
        "objects": (
            lambda: dist.broadcast_object_list([0], root),
            ("src", lambda: dist.broadcast_object_list([0], wrong_root)),
            ("operation", lambda: dist.all_gather_object([None] * size, 0)),
        ),
    }
    return options[draw.choice(sorted(options))]


def collective_mistake(draw, size):
    """One rank calls a collective differently."""
    right, *wrong = collective_calls(draw, make(draw, SUMMED), size)
    what, mistaken = draw.choice(wrong)
    culprit = draw.randrange(size)
    calls = [(mistaken if rank == culprit else right,) for rank in range(size)]
    blamed = f"rank {culprit} disagrees with " if size > 2 else "ranks 0 and 1 disagree "
    others = ranked([rank for rank in range(size) if rank != culprit]) + " " if size > 2 else ""
    return Mistake(calls, tuple(range(size)), f"{blamed}{others}about the {what} of")


def message_calls(spelled):
    """Functions that send and receive, of one line each: (tensor, peer, tag) -> None."""
    transport = active_transport()
    return {
        "blocking": (lambda x, to, tag: dist.send(x, to, tag=tag), lambda x, to, tag: dist.recv(x, to, tag=tag)),
        "started": (
            lambda x, to, tag: dist.isend(x, to, tag=tag).wait(),
            lambda x, to, tag: dist.irecv(x, to, tag=tag).wait(),
        ),
        "batched": (
            lambda x, to, tag: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to, tag=tag)])[0].wait(),
            lambda x, to, tag: dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, to, tag=tag)])[0].wait(),
        ),
        "any": (lambda x, to, tag: dist.send(x, to, tag=tag), lambda x, to, tag: dist.recv(x, tag=tag)),  # noqa: ARG005
        "own": (
            lambda x, to, tag: transport.send(x, to, tag),  # noqa: PLW0108 - its line is compared
            lambda x, to, tag: transport.recv(x, to, tag),  # noqa: PLW0108 - its line is compared
        ),
        "own started": (
            lambda x, to, tag: transport.start("send", x, to, tag).wait(),
            lambda x, to, tag: transport.start("recv", x, to, tag).wait(),
        ),
    }[spelled]


def message_mistake(draw, size, number):
    """Two ranks do not agree about a message, or nobody answers one."""
    spelled = draw.choice(["blocking", "started", "batched", "any", "own", "own started"])
    send, recv = message_calls(spelled)
    source, destination = draw.sample(range(size), 2)
    x, tag = make(draw), 10 * number  # a message that a rank gave up keeps its place among those of its tag
    kind = draw.choice(
        ["shape", "dtype", "tag", "order", "both send", "unanswered", "unreceived", "collective", "peer"]
    )
    sends, receives = (send, x, destination, tag), (recv, x, source, tag)
    calls, named, what = [None] * size, (source, destination), "deadlock, "
    if kind in ("shape", "dtype"):
        receives = (recv, other_shape(x) if kind == "shape" else other_dtype(x, DTYPES), source, tag)
        what = f"ranks {source} and {destination} disagree about the {kind} of a message:"
    elif kind == "tag":
        receives = (recv, x, source, tag + 1)
        what = f"; ranks {source} and {destination} disagree about the tag of a message:"
    elif kind == "order":
        sends = (twice, send, x, destination, (tag, tag + 1))
        receives = (twice, recv, x, source, (tag + 1, tag))
    elif kind == "collective":
        receives = (lambda: dist.all_reduce(torch.ones(1)),)
        calls = [receives] * size
    elif kind == "both send" or size == 2 or spelled == "any":
        receives = (send, x, source, tag)
    elif kind == "peer":
        receives = (recv, x, next(rank for rank in range(size) if rank not in named), tag)
        named = (destination,)  # which may be told before the other one has called
    calls[source], calls[destination] = sends, receives
    if kind in ("unanswered", "unreceived"):
        silent = source if kind == "unanswered" else destination
        calls[silent] = None
        named = tuple(rank for rank in named if rank != silent)
    return Mistake(calls, named, what)


def twice(call, x, peer, tags):
    """Call with one tag, then with the other."""
    for tag in tags:
        call(x, peer, tag)


def mistake(seed, size):
    """Return the mistake of this number."""
    draw = random.Random(f"{seed} {size}")  # noqa: S311 - no secret
    return collective_mistake(draw, size) if draw.random() < 0.4 else message_mistake(draw, size, seed)


def meet():
    """Return once all ranks are here; what was said meanwhile, since somebody may have waited for this rank in vain."""
    texts = []
    while True:
        try:
            dist.barrier()
        except CollectiveMismatchError as error:  # noqa: PERF203 - as rarely as a mistake
            texts.append(str(error))
        else:
            return texts


def make_mistakes(seeds):
    """On a rank: make every mistake; per mistake what was said, where this rank called, and the seconds until then."""
    rank, size, told = dist.get_rank(), dist.get_world_size(), []
    for seed in seeds:
        case = mistake(seed, size)
        function, *arguments = case.calls[rank] or (None,)
        begun, texts = time.monotonic(), []
        try:
            if function is not None:
                function(*arguments)
        except CollectiveMismatchError as error:
            texts.append(str(error))
        seconds = time.monotonic() - begun
        texts += meet()
        called = arguments[0] if function is twice else function
        told.append((texts[0] if texts else "", called and line(called), seconds, case.named, case.what))
    return told


def problems(told):
    """What is missing in what the ranks, in their order, were told of one mistake."""
    _, _, _, named, what = told[0]
    shown = [what, *(f" at {told[rank][1]}" for rank in named), *(f"rank {rank}" for rank in named if len(named) == 1)]
    texts = {text for text, *_ in told if text}
    return [] if any(all(part in text for part in shown) for text in texts) else [f"not all of {shown} in {texts}"]


def main(arguments):
    """Make the mistakes; 1 if one was not told."""
    from hyper_parallel.transport.real.launched_processes import run_launched
    from hyper_parallel.transport.serialization import pack

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for 200 of them")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(arguments)
    longest, bad = 0.0, 0
    for size in (2, 3, 4):
        seeds = range(options.first + size - 2, options.first + options.count, 3)
        for begin in range(0, len(seeds), 200):
            batch = seeds[begin : begin + 200]
            done = run_launched(pack((make_mistakes, (batch,)), make_mistakes), size, "torch", options.seconds)
            if done.failure is not None:
                sys.stdout.write(f"{batch} on {size} ranks: {done.failure}\n")
                bad += 1
                continue
            for seed, *told in zip(batch, *done.results, strict=True):
                longest = max(longest, *(seconds for _, _, seconds, _, _ in told))
                lacks = problems(told)
                bad += bool(lacks)
                sys.stdout.writelines(f"mistake {seed} on {size} ranks: {lack}\n" for lack in lacks)
    sys.stdout.write(f"{options.count} mistakes, {bad} of them not told, at most {longest:.2f} s until a rank knew\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
