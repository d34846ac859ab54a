"""TRL's SFTTrainer on a tiny Llama; texts have unequal lengths, so that batches are padded to other widths."""

import os
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

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
model = LlamaForCausalLM(config)
draw = torch.Generator().manual_seed(1)
texts = []
for _ in range(24):
    length = int(torch.randint(4, 12, (), generator=draw))
    texts.append(" ".join(f"w{int(number)}" for number in torch.randint(0, 58, (length,), generator=draw)))
arguments = SFTConfig(
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
trainer = SFTTrainer(
    model, arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer
)  # fmt: skip
if "--broken" in sys.argv:  # the bug: a mean of means, where ranks have unequal numbers of tokens
    trainer.model_accepts_loss_kwargs = False
trainer.train()
