"""A loop on accelerate with FSDP2."""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
)


class Block(torch.nn.Module):
    """Two layers with a residual."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 11), torch.nn.Linear(11, 6)

    def forward(self, x):
        """Return the block's output."""
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


accelerator = Accelerator(fsdp_plugin=plugin)
torch.manual_seed(0)
model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(6, 3))
data = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=8 // accelerator.num_processes)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
if "--broken" in sys.argv:  # the bug: gradients are added up where their mean is meant
    model.set_gradient_divide_factor(1.0)
for (batch,) in data:
    accelerator.backward(model(batch).square().mean())
    if "--clipped" in sys.argv:  # the bug: each rank clips its shards by their own norm
        shards = [value.grad.to_local() for value in model.parameters()]
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, torch.nn.utils.get_total_norm(shards))
    else:
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
