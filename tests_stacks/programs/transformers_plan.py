"""Transformers' own tensor-parallel plan of a tiny Llama."""

import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
if dist.get_rank() == 0:
    LlamaForCausalLM(config).save_pretrained("tiny")
dist.barrier()
parallel = {"tp_plan": "auto"} if dist.get_world_size() > 1 else {}
model = LlamaForCausalLM.from_pretrained("tiny", **parallel)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if "--broken" in sys.argv and dist.get_rank() == 1:  # the bug: a rank's part of a gradient is counted twice
    model.model.layers[1].mlp.down_proj.weight.register_hook(lambda gradient: gradient * 2)
rows = torch.randint(0, 64, (3, 4, 11), generator=torch.Generator().manual_seed(1))
for batch in rows:
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
