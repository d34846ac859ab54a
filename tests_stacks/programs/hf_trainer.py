"""Hugging Face Trainer on a tiny Llama: data parallel by DDP."""

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

set_seed(0)
config = LlamaConfig(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
model = LlamaForCausalLM(config)
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
trainer = Trainer(model, arguments, train_dataset=data)


class Unsynchronized(TrainerCallback):
    """The bug: gradients are never averaged."""

    def on_step_begin(self, *_, **__):
        """Switch the reduction of DDP off."""
        trainer.model_wrapped.require_backward_grad_sync = False


if "--broken" in sys.argv:
    trainer.add_callback(Unsynchronized())
trainer.train()
