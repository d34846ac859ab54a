"""Trains a small language model in a pipeline of two stages, each tensor parallel; one rank trains the same.

torchrun --nproc-per-node 4 examples/pipeline.py
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    NoParallel,
    Replicate,
    RowwiseParallel,
    clip_grad_norm_,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.checkpoint import save

if TYPE_CHECKING:
    from hyper_parallel import ParallelStyle

VOCABULARY, WIDTH, HIDDEN = 29, 9, 13
STAGES = (("embed", "layers.0"), ("layers.1", "norm", "head"))


class Block(nn.Module):
    """A feed-forward network behind a norm, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, like ``x`` (batch, sequence, WIDTH)."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """The whole model, with its names; on a rank of a pipeline, ``forward`` calls the modules of a stage.

    Args:
        called: names of these modules.
    """

    def __init__(self, called: tuple[str, ...]) -> None:
        super().__init__()
        self.called = called
        self.embed, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stage's output (batch, sequence, features) for token ids or the output of the stage before."""
        for name in self.called:
            x = self.get_submodule(name)(x)
        return x


def plan(name: str) -> ParallelStyle | dict[str, ParallelStyle]:
    """Return the styles of a module: every parameter becomes a DTensor, so that the mesh says which ranks hold it."""
    styles = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "norm": NoParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return styles.get(name) or {"norm": NoParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def clip_over_stages(parameters: list[nn.Parameter], max_norm: float, group: dist.ProcessGroup) -> Tensor:
    """Scale gradients so that their norm over all stages is at most ``max_norm``; return the norm, 0-d."""
    power_sum = clip_grad_norm_(parameters, math.inf) ** 2  # of this stage, over its tensor-parallel ranks
    dist.all_reduce(power_sum, group=group)
    norm = power_sum.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over tokens, 0-d, for ``logits`` (batch, sequence, VOCABULARY)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(folder: str | None = None, steps: int = 3) -> list[float]:
    """Train, save a checkpoint of the whole model in ``folder``, and return the norms of the gradients."""
    world = get_platform().get_world_size()
    stages = STAGES if world > 1 else (sum(STAGES, ()),)
    mesh = init_device_mesh("cpu", (len(stages), world // len(stages)), mesh_dim_names=("pp", "tp"))
    index, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    torch.manual_seed(0)
    model = Model(stages[index]).double()
    for ranks, names in zip(mesh.mesh, stages, strict=True):  # of all stages: ranks hold nothing of the other ones
        for name in names:
            stage_mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("tp",))
            parallelize_module(model.get_submodule(name), stage_mesh, plan(name))
    own = [x for name in stages[index] for x in model.get_submodule(name).parameters()]
    optimizer = torch.optim.AdamW(own, lr=0.01)
    stage = PipelineStage(model, index, len(stages), torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss)
    norms = []
    for _ in range(steps):
        ids, targets = torch.randint(VOCABULARY, (2, 8, 5))
        first = (ids,) if index == 0 else ()
        schedule.step(*first, **({"target": targets} if index == len(stages) - 1 else {}))
        norms.append(clip_over_stages(own, 0.5, group).item())
        optimizer.step()
        optimizer.zero_grad()
    if folder:
        save(model, folder)
    return norms


if __name__ == "__main__":
    print(*train(), sep="\n")
