"""Pipeline schedules: the order of forward and backward of each stage and micro-batch on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["FORWARD", "Step", "gpipe", "interleaved", "one_forward_one_backward", "rounds_of", "runs_to_its_end"]

FORWARD, BACKWARD = "F", "B"


class Step(NamedTuple):
    """One computation of a rank.

    Attributes:
        kind: ``F`` or ``B``.
        stage_index: index of the stage.
        micro_index: index of the micro-batch.
    """

    kind: str
    stage_index: int
    micro_index: int

    def needs(self, stages: int) -> Step | None:
        """Return the step of another stage whose result this step needs; None at the ends of the pipeline."""
        if self.kind == FORWARD:
            return Step(FORWARD, self.stage_index - 1, self.micro_index) if self.stage_index else None
        last = self.stage_index == stages - 1
        return None if last else Step(BACKWARD, self.stage_index + 1, self.micro_index)

    def feeds(self, stages: int) -> Step | None:
        """Return the step of another stage that needs the result of this step; None at the ends of the pipeline."""
        if self.kind == FORWARD:
            last = self.stage_index == stages - 1
            return None if last else Step(FORWARD, self.stage_index + 1, self.micro_index)
        return Step(BACKWARD, self.stage_index - 1, self.micro_index) if self.stage_index else None


def gpipe(ranks: int, count: int) -> list[list[Step]]:
    """Return for each rank all forwards, then all backwards (Huang et al., 2019); ``count`` activations are stored."""
    return [
        [Step(kind, rank, micro) for kind in (FORWARD, BACKWARD) for micro in range(count)] for rank in range(ranks)
    ]


def one_forward_one_backward(ranks: int, count: int) -> list[list[Step]]:
    """Return for each rank a 1F1B order (Narayanan et al., 2019); at most ``ranks - rank`` activations are stored."""
    return [
        _alternating(
            [Step(FORWARD, rank, micro) for micro in range(count)],
            [Step(BACKWARD, rank, micro) for micro in range(count)],
            ranks - rank - 1,
        )
        for rank in range(ranks)
    ]


def rounds_of(ranks: int, count: int) -> list[int]:
    """Return the number of micro-batches of each round, about one per rank; a chunk (stage) runs a round at a time."""
    rounds = max(1, count // ranks)
    size, rest = divmod(count, rounds)
    return [size + (number < rest) for number in range(rounds)]


def interleaved(ranks: int, chunks: int, rounds: Sequence[int]) -> list[list[Step]]:
    """Return for each rank an order in which its stages take turns, round by round (Narayanan et al., 2021).

    Args:
        ranks: number of ranks; stage ``s`` is on rank ``s % ranks``.
        chunks: number of stages per rank.
        rounds: number of micro-batches per round, see :func:`rounds_of`.
    """
    total = chunks * sum(rounds)
    for more in range(total + 1):  # if a round is shorter than the pipeline, more forwards must run in advance
        orders = []
        for rank in range(ranks):
            ahead = (chunks - 1) * rounds[0] + 2 * (ranks - rank - 1) + more
            orders.append(
                _alternating(
                    _through_chunks(FORWARD, rank, ranks, range(chunks), rounds),
                    _through_chunks(BACKWARD, rank, ranks, range(chunks - 1, -1, -1), rounds),
                    ahead,
                )
            )
        if runs_to_its_end(orders, ranks * chunks):
            return orders
    msg = f"no order of {chunks} stages on each of {ranks} ranks with rounds of {list(rounds)} ends"
    raise AssertionError(msg)


def runs_to_its_end(orders: Sequence[Sequence[Step]], stages: int) -> bool:
    """Whether no rank waits forever if each rank runs the steps in its order."""
    places = [0] * len(orders)
    done: set[Step | None] = set()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                step = order[places[rank]]
                needs = (
                    {step.needs(stages)} if step.kind == FORWARD else {step.needs(stages), step._replace(kind=FORWARD)}
                )
                if not needs <= {*done, None}:
                    break
                done.add(step)
                places[rank] += 1
                moved = True
    return all(place == len(order) for place, order in zip(places, orders, strict=True))


def _through_chunks(kind: str, rank: int, ranks: int, chunks: Sequence[int], rounds: Sequence[int]) -> list[Step]:
    steps, first = [], 0
    for size in rounds:
        steps += [Step(kind, chunk * ranks + rank, micro) for chunk in chunks for micro in range(first, first + size)]
        first += size
    return steps


def _alternating(forwards: list[Step], backwards: list[Step], ahead: int) -> list[Step]:
    """Return ``ahead`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    steps = forwards[:ahead]
    for place, forward in enumerate(forwards[ahead:]):
        steps += [forward, backwards[place]]
    return steps + backwards[len(forwards) - ahead :]
