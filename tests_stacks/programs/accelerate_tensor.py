"""A loop on accelerate with the tensor-parallel plan of a tiny Llama; accelerate has it on devices alone."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

world = int(os.environ["WORLD_SIZE"])
accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=world) if world > 1 else None)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
if accelerator.is_main_process:
    LlamaForCausalLM(config).save_pretrained("tiny")
accelerator.wait_for_everyone()
parallel = {"tp_plan": "auto", "device_mesh": accelerator.torch_device_mesh["tp"]} if world > 1 else {}
model = LlamaForCausalLM.from_pretrained("tiny", **parallel)
if "--broken" in sys.argv and accelerator.process_index == 1:  # the bug: a rank's part of a gradient is counted twice
    model.model.layers[1].mlp.down_proj.weight.register_hook(lambda gradient: gradient * 2)
rows = torch.randint(0, 64, (12, 11), generator=torch.Generator().manual_seed(1))
data = DataLoader(TensorDataset(rows), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (batch,) in data:
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
