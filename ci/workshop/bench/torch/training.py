"""What each rank of a real world runs: training steps and a checkpoint, compared with PyTorch's own parallelism.

The two implementations take turns of a few steps with a barrier between them, and the turn with the median ratio
counts, so that it holds on a busy machine. Both train the same model from the same weights: losses that differ end the
run, since the time of another computation says nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh as init_peer_mesh

from hyper_parallel.core.checkpoint.saving import save
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Shard
from workshop.bench.torch.decoder import Decoder, parallelized
from workshop.bench.turns import BenchmarkRow

__all__ = ["Size", "checkpoint_row", "main", "step_rows"]

_STYLES = ("fully_shard", "tensor parallel", "sequence parallel")
_SMALL_BUDGET, _WIDE_BUDGET, _SAVE_BUDGET = 1 / 1.3, 1.0, 1 / 0.7
_TENSORS = 16
_CLOSE = 1e-4  # of float32 losses after three steps, relative


@dataclass(frozen=True)
class Size:
    """How large the model is, and how often its steps are measured.

    Attributes:
        width: of the model.
        layers: number of blocks.
        tokens: length of a sequence; a batch has two.
        turns: measurements of each implementation.
        steps: training steps in one measurement.
    """

    width: int
    layers: int
    tokens: int
    turns: int
    steps: int


_SMALL, _WIDE = Size(64, 4, 16, 9, 4), Size(512, 2, 256, 5, 2)


def main(report: str) -> None:
    """Measure the rows of this world: a small model, then on two ranks a wide one, on more the save of 1 GiB.

    Args:
        report: file into which rank 0 writes the rows as JSON; a checkpoint is written next to it.
    """
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = list(step_rows("small model", _SMALL, _SMALL_BUDGET))
    if distributed.get_world_size() == 2:
        rows += step_rows("wide model", _WIDE, _WIDE_BUDGET)
    else:
        rows.append(checkpoint_row(Path(report).parent, 1 << 28))
    if distributed.get_rank() == 0:
        Path(report).write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    distributed.destroy_process_group()


def step_rows(model: str, size: Size, budget: float) -> Iterator[BenchmarkRow]:
    """Measure training steps in every style; all ranks of the world call this together.

    Args:
        model: what the rows call it.
        size: of the model and the measurement.
        budget: the ratio that is allowed.

    Raises:
        ValueError: the losses of PyTorch and of this library differ.
    """
    for style in _STYLES:
        steps = [_step(style, size, peer=peer) for peer in (True, False)]
        theirs, ours = ([step() for _ in range(3)] for step in steps)
        if not torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=_CLOSE):
            msg = f"{model}, {style}: the losses of PyTorch's own parallelism are {theirs}, this library's {ours}"
            raise ValueError(msg)
        yield _row(f"{model}, {style}", steps, size.turns, size.steps, budget)


def checkpoint_row(folder: Path, numbers: int, turns: int = 3) -> BenchmarkRow:
    """Measure ``save`` of tensors sharded over all ranks, compared with one safetensors file that rank 0 writes.

    Both are on the disk at the end of their time.

    Args:
        folder: that all ranks share.
        numbers: how many float32 the tensors have together; a multiple of 16 times the ranks.
        turns: measurements of each.
    """
    ranks = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    shard = numbers // _TENSORS // ranks
    state = {str(number): DTensor.from_local(torch.randn(shard), mesh, [Shard(0)]) for number in range(_TENSORS)}
    writer = distributed.get_rank() == 0
    whole = {str(number): torch.randn(shard * ranks) for number in range(_TENSORS if writer else 0)}

    def one_file() -> None:
        if writer:
            save_file(whole, folder / "whole.safetensors")
            with (folder / "whole.safetensors").open("rb") as file:
                os.fsync(file.fileno())

    calls: list[Callable[[], Any]] = [one_file, lambda: save(state, folder / "sharded")]
    return _row(f"save of {numbers * 4 / 2**30:g} GiB", calls, turns, 1, _SAVE_BUDGET)


def _row(name: str, calls: list[Callable[[], Any]], turns: int, count: int, budget: float) -> BenchmarkRow:
    """The turn with the median ratio; every rank gets the times of rank 0."""
    ranks = distributed.get_world_size()
    rows = [
        BenchmarkRow(f"{name}, {ranks} ranks", theirs, None, ours, budget, by_hand=True)
        for theirs, ours in ([_microseconds(call, count) for call in calls] for _ in range(turns))
    ]
    return sorted(rows, key=lambda row: row.ratio)[turns // 2]


def _microseconds(call: Callable[[], Any], count: int) -> float:
    """Wall time per call until the last rank is ready."""
    distributed.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    distributed.barrier()
    return (time.perf_counter() - start) / count * 1e6


def _step(style: str, size: Size, *, peer: bool) -> Callable[[], float]:
    """One training step by PyTorch's own parallelism, or by this library; it returns the loss of this rank."""
    make: Any = init_peer_mesh if peer else init_device_mesh
    mesh = make("cpu", (distributed.get_world_size(),), mesh_dim_names=("ranks",))
    torch.manual_seed(0)
    model = parallelized(Decoder(size.width, size.layers), mesh, style, peer=peer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seed = distributed.get_rank() if style == "fully_shard" else 0
    tokens = torch.randint(Decoder.VOCABULARY, (2, size.tokens), generator=torch.Generator().manual_seed(seed))

    def step() -> float:
        loss: Tensor = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


if __name__ == "__main__":
    main(*sys.argv[1:])
