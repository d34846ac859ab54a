"""LoRA adapters of PEFT on a tiny Llama, trained by the Trainer; ``dora`` adds the magnitudes of DoRA."""

import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
config = LlamaConfig(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, use_dora="dora" in sys.argv)
model = get_peft_model(LlamaForCausalLM(config), adapters)
if "--broken" in sys.argv:  # the bug: one adapter's gradient is not averaged
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
rows = torch.randint(0, 61, (24, 11), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=3,
    learning_rate=1e-2,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=data).train()
