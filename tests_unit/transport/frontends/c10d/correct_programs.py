"""Random correct programs on real ranks, of collectives and messages: nobody may be alarmed, and every value is right.

``python tests_unit/transport/frontends/c10d/correct_programs.py --steps 10000`` takes that many steps on warm worlds of
two to four ranks. All ranks draw the same step and know every rank's values, which are small integers, so each of
them computes what it must receive. Ranks are late at random, and wait in an order of
their own for what they have started.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

import torch
import torch.distributed as dist

from hyper_parallel.transport.base import active_transport

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32)
REDUCTIONS = {
    "SUM": lambda values: torch.stack(values).sum(0).to(values[0].dtype),
    "MAX": lambda values: torch.stack(values).amax(0),
    "MIN": lambda values: torch.stack(values).amin(0),
}


class Step:
    """One step: its random choices, the members that take it and their values.

    Args:
        number: of the step; every rank draws the same.
        groups: per tuple of ranks its process group.
    """

    def __init__(self, number, groups):
        self.draw = random.Random(f"{dist.get_world_size()} {number}")  # noqa: S311 - no secret
        self.ranks = self.draw.choice(sorted(groups))
        self.group = groups[self.ranks]
        self.rank = dist.get_rank()
        self.async_op = self.draw.random() < 0.5
        self.dtype = self.draw.choice(DTYPES)
        self.tag = self.draw.randrange(5)
        self.own_tag = 100 + number  # a receive from any source must not meet the next step's messages

    def tensor(self, shape=None):
        """A tensor of a random shape, empty at times."""
        if shape is None:
            shape = [self.draw.randint(self.draw.random() >= 0.05, 6) for _ in range(self.draw.randint(0, 3))]
        size = torch.Size(shape).numel()
        return torch.tensor([self.draw.randint(-9, 9) for _ in range(size)], dtype=self.dtype).reshape(shape)

    def tensors(self):
        """Tensors of one shape, one per member."""
        first = self.tensor()
        return [first, *(self.tensor(first.shape) for _ in self.ranks[1:])]

    @property
    def position(self):
        """The place of this rank among the members."""
        return self.ranks.index(self.rank)


def all_reduce(step):
    """Any reduction over a group."""
    values, name = step.tensors(), step.draw.choice(sorted(REDUCTIONS))
    mine = values[step.position].clone()
    work = dist.all_reduce(mine, getattr(dist.ReduceOp, name), group=step.group, async_op=step.async_op)
    return [work], lambda: [(mine, REDUCTIONS[name](values))]


def broadcast(step):
    """From any member."""
    values, source = step.tensors(), step.draw.randrange(len(step.ranks))
    mine = values[step.position].clone()
    work = dist.broadcast(mine, step.ranks[source], group=step.group, async_op=step.async_op)
    return [work], lambda: [(mine, values[source])]


def all_gather(step):
    """Into a list."""
    values = step.tensors()
    parts = [torch.empty_like(value) for value in values]
    work = dist.all_gather(parts, values[step.position], group=step.group, async_op=step.async_op)
    return [work], lambda: list(zip(parts, values, strict=True))


def reduce_scatter(step):
    """From a list, for which every member has a value for every member."""
    values, count = step.tensors(), len(step.ranks)
    mine = torch.empty_like(values[0])
    parts = [value + step.position for value in values]
    work = dist.reduce_scatter(mine, parts, group=step.group, async_op=step.async_op)
    return [work], lambda: [(mine, values[step.position] * count + sum(range(count)))]


def all_to_all(step):
    """Uneven rows, none at times."""
    count = len(step.ranks)
    rows = [[step.tensor((step.draw.randint(0, 3), 2)) for _ in range(count)] for _ in range(count)]
    outgoing, incoming = rows[step.position], [row[step.position] for row in rows]
    mine = torch.empty(sum(len(part) for part in incoming), 2, dtype=step.dtype)
    sizes = [len(part) for part in incoming], [len(part) for part in outgoing]
    work = dist.all_to_all_single(mine, torch.cat(outgoing), *sizes, group=step.group, async_op=step.async_op)
    return [work], lambda: [(mine, torch.cat(incoming))]


def gathered_object(step):
    """Objects of all members."""
    values = [step.draw.randint(0, 99) for _ in step.ranks]
    gathered = [None] * len(step.ranks)
    dist.all_gather_object(gathered, values[step.position], group=step.group)
    return [], lambda: [(torch.tensor(gathered), torch.tensor(values))]


def barrier(step):
    """Of a group."""
    return [dist.barrier(group=step.group, async_op=step.async_op)], list


def own_collectives(step):
    """This library's own, started or not."""
    transport, values = active_transport(), step.tensors()
    mine = values[step.position]
    if step.async_op:
        work = transport.start("all_reduce", mine, "sum", step.ranks)
        return [], lambda: [(work.wait(), REDUCTIONS["SUM"](values))]
    shapes = [tuple(value.shape) for value in values]
    gathered = transport.all_gather(mine, step.ranks, shapes)
    return [], lambda: list(zip(gathered, values, strict=True))


def ring(step):
    """Every member sends to the next one, by isend and irecv, or in a batch."""
    values, count, place = step.tensors(), len(step.ranks), step.position
    to, source = step.ranks[(place + 1) % count], step.ranks[place - 1]
    mine = torch.empty_like(values[0])
    if step.async_op:
        pairs = [(dist.isend, values[place], to), (dist.irecv, mine, source)]
        works = dist.batch_isend_irecv([dist.P2POp(call, x, peer, step.group, step.tag) for call, x, peer in pairs])
    else:
        works = [
            dist.isend(values[place], to, group=step.group, tag=step.tag),
            dist.irecv(mine, source, group=step.group, tag=step.tag),
        ]
    return works, lambda: [(mine, values[place - 1])]


def pipeline(step):
    """From member to member by send and recv, with one added on the way."""
    value, place = step.tensor(), step.position
    mine = value.clone()
    if place:
        dist.recv(mine, step.ranks[place - 1], group=step.group, tag=step.tag)
        mine += 1
    if place + 1 < len(step.ranks):
        dist.send(mine, step.ranks[place + 1], group=step.group, tag=step.tag)
    return [], lambda: [(mine, value + place)]


def many_messages(step):
    """Random messages between random members under random tags, all started before any is waited for."""
    works, pairs = [], []
    for _ in range(step.draw.randint(1, 6)):
        source, destination = step.draw.sample(step.ranks, 2)
        value, tag = step.tensor(), step.draw.randrange(3)
        if step.rank == source:
            works.append(dist.isend(value, destination, group=step.group, tag=tag))
        elif step.rank == destination:
            mine = torch.empty_like(value)
            works.append(dist.irecv(mine, source, group=step.group, tag=tag))
            pairs.append((mine, value))
    return works, lambda: pairs


def any_source(step):
    """The first member receives from whoever sends, of values that say who."""
    first, *others = step.ranks
    if step.rank != first:
        dist.send(torch.tensor([step.rank]), first, group=step.group, tag=step.own_tag)
        return [], list
    received = [torch.empty(1, dtype=torch.long) for _ in others]
    sources = [dist.recv(mine, group=step.group, tag=step.own_tag) for mine in received]
    return [], lambda: [
        (torch.cat(received), torch.tensor(sources)),
        (torch.tensor(sorted(sources)), torch.tensor(sorted(others))),
    ]


def own_messages(step):
    """This library's own, around a ring."""
    transport, values, count, place = active_transport(), step.tensors(), len(step.ranks), step.position
    sent = transport.start("send", values[place], step.ranks[(place + 1) % count], step.tag)
    received = transport.start("recv", values[place - 1], step.ranks[place - 1], step.tag)
    pair = (received.wait(), values[place - 1])
    sent.wait()
    return [], lambda: [pair]


KINDS = (
    all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, gathered_object, barrier, own_collectives,
    ring, pipeline, many_messages, any_source, own_messages,
)  # fmt: skip


def take_steps(first, count):
    """On a rank: take the steps; return those whose values were wrong, by number and kind, and what was compared."""
    size, wrong, compared = dist.get_world_size(), [], 0
    groups = {tuple(range(size)): dist.group.WORLD}
    for ranks in sorted({tuple(range(1, size)), (0, size - 1), tuple(range(0, size, 2))}):
        if 1 < len(ranks) < size:
            groups[ranks] = dist.new_group(list(ranks))  # by all ranks: PyTorch counts groups to name them
    own = random.Random(f"{first} {dist.get_rank()}")  # noqa: S311 - no secret
    started = []

    def finish(number, kind, works, pairs):
        for work in own.sample(works, len(works)):
            work.wait()
        results = pairs()
        wrong.extend((number, kind) for mine, expected in results if not torch.equal(mine, expected))
        return len(results)

    for number in range(first, first + count):
        step = Step(number, groups)
        kind = step.draw.choice(KINDS)
        at_once = step.draw.random() < 0.6  # for all: ranks that are to wait for each other must all have started
        if own.random() < 0.05:
            time.sleep(own.random() * 0.01)
        if dist.get_rank() in step.ranks:
            works, pairs = kind(step)
            started.append((number, kind.__name__, [work for work in works if work is not None], pairs))
        if at_once or number == first + count - 1:
            own.shuffle(started)
            compared += sum(finish(*entry) for entry in started)
            started.clear()
    dist.barrier()
    return wrong, compared


def run(size, first, count, seconds):
    """Take the steps on a warm world; return what is wrong, in words, and how many tensors were compared."""
    from hyper_parallel.transport.real.launched_processes import run_launched
    from hyper_parallel.transport.serialization import pack

    done = run_launched(pack((take_steps, (first, count)), take_steps), size, "torch", seconds)
    if done.failure is not None:
        return [f"steps {first} to {first + count - 1} on {size} ranks: {done.failure}"], 0
    wrong = [
        f"step {number} ({kind}) on rank {rank} of {size} has a wrong value"
        for rank, (bad, _) in enumerate(done.results)
        for number, kind in bad
    ]
    return wrong, sum(compared for _, compared in done.results)


def main(arguments):
    """Take the steps and print what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1200.0, help="limit for 100 steps")
    options = parser.parse_args(arguments)
    bad = compared = steps = 0
    for begin in range(options.first, options.first + options.steps, 100):
        size = 2 + begin // 100 % 3
        count = min(100, options.first + options.steps - begin)
        wrong, tensors = run(size, begin, count, options.seconds)
        bad, compared, steps = bad + len(wrong), compared + tensors, steps + count
        sys.stdout.write("".join(f"{line}\n" for line in wrong))
        sys.stdout.flush()
    sys.stdout.write(f"{steps} steps, {compared} tensors compared, {bad} problems\n")
    return bool(bad or not compared)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
