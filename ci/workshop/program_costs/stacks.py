"""The programs of training stacks, how each is verified, and which value its bug makes wrong first."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["STACKS", "Stack"]

PROGRAMS = Path(__file__).parents[3] / "tests_stacks" / "programs"


@dataclass(frozen=True)
class Stack:
    """A program of a stack.

    Attributes:
        packages: that must be installed.
        wrong: pattern of the first value that its bug makes wrong.
        pretend: the device that the CPU stands in for.
        program: name of its file, if it is another than the stack's.
        arguments: of the program.
        ranks: number of them.
        first: what runs once before, alone: a stack that compiles something then.
        broken: option that switches the bug on.
        others: options that switch another bug on, and the pattern of the first value that it makes wrong.
    """

    packages: tuple[str, ...]
    wrong: str
    pretend: str = ""
    program: str = ""
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    first: str = ""
    broken: str = "--broken"
    others: Mapping[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Return the file of the program that has this name in :data:`STACKS`."""
        return PROGRAMS / f"{self.program or name}.py"

    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [package for package in self.packages if importlib.util.find_spec(package) is None]

    def bugs(self) -> dict[str, str]:
        """Return the options that switch a bug on, and the pattern of the first value that each makes wrong."""
        return {self.broken: self.wrong, **self.others}


_BUILD = "import deepspeed; deepspeed.init_distributed('gloo')"
_CLIPPED = {"--clipped": "gradient norm"}
STACKS = {
    "hf_trainer": Stack(("transformers", "accelerate"), "*"),
    "accelerate_ddp": Stack(("accelerate",), "2.weight", others=_CLIPPED),
    "accelerate_fsdp2": Stack(("accelerate",), "*", "cuda", others=_CLIPPED),
    "accelerate_tensor": Stack(("accelerate", "transformers"), "*.layers.1.mlp.down_proj.weight", "cuda"),
    "peft_lora": Stack(("peft", "transformers", "accelerate"), "*v_proj.lora_B*"),
    "peft_dora": Stack(("peft", "transformers", "accelerate"), "*v_proj.lora_B*", "", "peft_lora", ("dora",)),
    "fabric": Stack(("lightning",), "*"),
    "lightning_trainer": Stack(("lightning",), "*"),
    "fabric_fsdp": Stack(("lightning",), "gradient norm", "cuda", "fabric_parallel", ("fsdp",), broken="--clipped"),
    "fabric_model_parallel": Stack(("lightning",), "*", "", "fabric_parallel", ("model",), ranks=4, others=_CLIPPED),
    "lightning_fsdp": Stack(("lightning",), "gradient norm", "cuda", "lightning_parallel", ("fsdp",)),
    "lightning_model_parallel": Stack(("lightning",), "*", "", "lightning_parallel", ("model",), ranks=4),
    "deepspeed_zero_1": Stack(("deepspeed",), "2.weight", "", "deepspeed_zero", ("1",), first=_BUILD, others=_CLIPPED),
    "deepspeed_zero_2": Stack(("deepspeed",), "2.weight", "", "deepspeed_zero", ("2",), first=_BUILD, others=_CLIPPED),
    "deepspeed_zero_3": Stack(("deepspeed",), "2.weight", "", "deepspeed_zero", ("3",), first=_BUILD, others=_CLIPPED),
    "hydra_folder": Stack(("hydra",), "2.*", "", arguments=("hydra.job.chdir=true", "rate=0.02"), broken="broken=true"),
    "nano_gpt": Stack((), "norm.*", others={"--summed": "norm.weight"}),
    "olmo_fsdp2": Stack(("olmo_core",), "*.weight"),
    "trl_sft": Stack(("trl", "transformers", "accelerate"), "*"),
    "trl_dpo": Stack(("trl", "transformers", "accelerate"), "LlamaForCausalLM.model.* (no_grad)"),
    "torchtitan_llama": Stack(("torchtitan",), "output.weight", "cuda"),
    "torchtitan_tensor": Stack(
        ("torchtitan",), "layers.1.ffn_norm.weight", "cuda", "torchtitan_llama", ("tensor",), ranks=4
    ),
    "torchtitan_context": Stack(
        ("torchtitan",), "layers.0.attention.inner_attention", "cuda", "torchtitan_llama", ("context",)
    ),
    "torchtitan_pipeline": Stack(("torchtitan",), "layers.0.*", "cuda", "torchtitan_llama", ("pipeline",)),
    "transformers_plan": Stack(("transformers", "accelerate"), "*.layers.1.mlp.down_proj.weight"),
    "megatron_gpt": Stack(("megatron",), "decoder.layers.1*", "cuda"),
    "megatron_distributed": Stack(("megatron",), "decoder.layers.1.mlp.linear_fc2.weight", "cuda", others=_CLIPPED),
    "megatron_half": Stack(
        ("megatron",),
        "decoder.layers.1.mlp.linear_fc2.weight",
        "cuda",
        "megatron_distributed",
        ("half",),
        others={"--stale": "embedding.word_embeddings.weight"},
    ),
    "megatron_pipeline": Stack(("megatron",), "embedding.word_embeddings.weight", "cuda"),
    "megatron_experts": Stack(("megatron",), "decoder.layers.*.mlp.experts.local_experts.*", "cuda"),
    "megatron_sequence": Stack(
        ("megatron",), "decoder.*layernorm.*", "cuda", "megatron_distributed", ("tensor",), ranks=4, others=_CLIPPED
    ),
}
