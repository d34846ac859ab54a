"""Fine-tunes a Llama of Transformers with adapters of PEFT (LoRA), tensor parallel with a plan by name.

torchrun --nproc-per-node 2 examples/hugging_face.py
hyper-parallel verify program examples/hugging_face.py --world-size 2
"""

from __future__ import annotations

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel import get_platform, init_device_mesh, parallelize_module

VOCABULARY = 61
PLAN = {  # the model's own plan, with the paths that PEFT gives its layers; an adapter is sharded as its layer is
    "model.layers.*.self_attn.q_proj.base_layer": "colwise",
    "model.layers.*.self_attn.q_proj.lora_B.*": "colwise",
    "model.layers.*.self_attn.[kv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj.base_layer": "rowwise",
    "model.layers.*.self_attn.o_proj.lora_A.*": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_rep",
}


def adapted() -> PeftModel:
    """Return a small Llama with random weights; a pretrained one comes from ``LlamaForCausalLM.from_pretrained``."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=34,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).double()
    return get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "o_proj"], init_lora_weights=False))


def train(steps: int = 3) -> list[float]:
    """Train the adapters on random tokens, which are the same on all ranks, and return the losses."""
    torch.manual_seed(0)
    model = adapted()
    mesh = init_device_mesh("cpu", (get_platform().get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model.base_model.model, mesh, PLAN)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=0.01)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (4, 11))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(*train(), sep="\n")
