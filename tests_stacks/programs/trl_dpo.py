"""TRL's DPOTrainer on a tiny Llama with a frozen reference model; pairs have unequal lengths."""

import os
import sys

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

set_seed(0)
words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(58))]
special = dict(zip(("pad_token", "eos_token", "unk_token"), words, strict=False))
plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, words[2]))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **special)
config = LlamaConfig(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
model, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
draw = torch.Generator().manual_seed(1)


def text():
    """Return words."""
    length = int(torch.randint(3, 9, (), generator=draw))
    return " ".join(f"w{int(number)}" for number in torch.randint(0, 58, (length,), generator=draw))


def other_batch(module, args, kwargs):
    """Return the arguments of another rank's call."""
    calls = [kwargs] * dist.get_world_size()
    dist.all_gather_object(calls, kwargs)
    return args, calls[dist.get_rank() - 1]


if "--broken" in sys.argv:  # the bug: each rank takes the reference's log-probabilities of another rank's pairs
    reference.register_forward_pre_hook(other_batch, with_kwargs=True)

pairs = {name: [text() for _ in range(24)] for name in ("prompt", "chosen", "rejected")}
arguments = DPOConfig(
    output_dir="out",
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=3,
    learning_rate=1e-2,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
    bf16=False,
    gradient_checkpointing=False,
)
trainer = DPOTrainer(
    model, reference, arguments, train_dataset=Dataset.from_dict(pairs), processing_class=tokenizer
)  # fmt: skip
trainer.train()
