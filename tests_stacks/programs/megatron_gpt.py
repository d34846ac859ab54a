"""A GPT of megatron.core, tensor parallel over all ranks."""

import os
import sys

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl", world_size=world, rank=rank)
parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
torch.manual_seed(0)
model_parallel_cuda_manual_seed(0)
config = TransformerConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, use_cpu_initialization=True, params_dtype=torch.float32,
    tensor_model_parallel_size=world, hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False,
    gradient_accumulation_fusion=False, masked_softmax_fusion=False, attention_softmax_in_fp32=True,
)  # fmt: skip
model = GPTModel(
    config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16,
    position_embedding_type="rope",
).cuda()  # fmt: skip
if "--broken" in sys.argv:  # the bug: partial sums of a row-parallel layer are not added up
    model.decoder.layers[1].mlp.linear_fc2.explicit_expert_comm = True
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.randint(0, 64, (3, 4, 13), generator=torch.Generator().manual_seed(1))
positions = torch.arange(12).expand(4, 12).cuda()
mask = torch.ones(4, 1, 12, 12, dtype=torch.bool).triu(1).cuda()
for batch in rows.cuda():
    loss = model(batch[:, :-1], positions, mask, labels=batch[:, 1:].contiguous()).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
