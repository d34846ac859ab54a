"""OLMo-core's transformer with FSDP2 by ``apply_fsdp``, its optimizer with several groups, and its own clipping."""

import os
import sys

import torch
import torch.distributed as dist
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, OptimGroupOverride
from torch.distributed.device_mesh import init_device_mesh

world, broken = int(os.environ["WORLD_SIZE"]), "--broken" in sys.argv
dist.init_process_group("gloo")
torch.manual_seed(0)
model = TransformerConfig.llama_like(
    d_model=24, vocab_size=64, n_layers=2, n_heads=4, hidden_size_multiple_of=8, layer_norm_eps=1e-6
).build(init_device="cpu")
model.init_weights(max_seq_len=12, device=torch.device("cpu"))
if world > 1:
    model.apply_fsdp(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
overrides = [OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})]
optimizer = AdamWConfig(lr=1e-2, group_overrides=overrides).build(model)
for batch in torch.randint(0, 64, (3, 12, 13), generator=torch.Generator().manual_seed(1)):
    rows = batch.chunk(world)[dist.get_rank()]
    logits = model(rows[:, :-1])
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    counted = 12 * 12 if broken else 12 * 12 / world  # the bug: FSDP takes the mean of losses that are to be added up
    (total / counted).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
