"""Lightning's Trainer on large models: ``model`` is its strategy for FSDP2 and tensor parallel, ``fsdp`` for FSDP1."""

import os
import sys

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

world = int(os.environ.get("WORLD_SIZE", "1"))
kind = sys.argv[1]
tensor = min(2, world) if kind == "model" else 1


class Regression(lightning.LightningModule):
    """A small regression."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))

    def configure_model(self):
        """Split the weights over the mesh of ModelParallelStrategy."""
        if kind == "model":
            parallelize_module(
                self.net, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
            )
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
            if "--broken" in sys.argv:  # the bug: gradients are added up where their mean is meant
                self.net.set_gradient_divide_factor(1.0)

    def training_step(self, batch, index):
        """Return the loss."""
        del index
        return self.net(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer):
        """Clip gradients of FSDP1, which Lightning leaves to its method; the bug: each rank clips by its own norm."""
        del optimizer
        if kind == "fsdp" and "--broken" in sys.argv:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        elif kind == "fsdp":
            self.trainer.strategy.model.clip_grad_norm_(0.1)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


lightning.seed_everything(0)
strategy = FSDPStrategy() if kind == "fsdp" else ModelParallelStrategy(world // tensor, tensor)
data = DataLoader(TensorDataset(torch.randn(24, 5)), batch_size=8 * tensor // world)
trainer = lightning.Trainer(
    accelerator="cpu" if kind == "model" else "cuda", devices=world, strategy=strategy, max_steps=3, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    gradient_clip_val=0.1 if kind == "model" else None,
)  # fmt: skip
trainer.fit(Regression(), data)
