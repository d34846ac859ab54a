"""Lightning's Trainer with DDP: the training step is called through the wrapper, inside the optimizer's closure."""

import os
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

world = int(os.environ.get("WORLD_SIZE", "1"))


class Regression(lightning.LightningModule):
    """A small regression."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))

    def training_step(self, batch, index):
        """Return the loss."""
        del index
        return self.net(batch[0]).square().mean()

    def on_train_batch_start(self, batch, index):
        """The bug: the second step's gradients are not averaged."""
        del batch
        if "--broken" in sys.argv:
            self.trainer.strategy.model.require_backward_grad_sync = index != 1

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


lightning.seed_everything(0)
model = Regression()
data = DataLoader(TensorDataset(torch.randn(24, 5)), batch_size=8 // world)
trainer = lightning.Trainer(
    accelerator="cpu", devices=world, strategy="ddp", max_steps=3, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.1,
)  # fmt: skip
trainer.fit(model, data)
