"""torchtitan's Llama, parallelized by its own function: FSDP2 over all ranks, which adds gradients up."""

import os
import sys

import torch
import torch.distributed as dist
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra.parallelize import parallelize_llama

world = int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
arguments = TransformerModelArgs(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64, max_seq_len=16)
model = Transformer(arguments)
with torch.no_grad():
    model.init_weights()
dims = ParallelDims(dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=world)
config = JobConfig()
config.activation_checkpoint.mode = "none"
config.training.mixed_precision_param = "float32"
if world > 1:
    parallelize_llama(model, dims, config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch in torch.randint(0, 64, (3, 4, 12), generator=torch.Generator().manual_seed(1)).cuda():
    rows = batch.chunk(world)[dist.get_rank()]
    loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    counted = (
        rows if "--broken" in sys.argv else batch
    )  # the bug: a mean over local tokens, where gradients are added up
    (loss / counted[:, 1:].numel()).backward()
    optimizer.step()
    optimizer.zero_grad()
