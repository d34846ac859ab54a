"""Training stacks as they are: the smallest program of each is equal on its ranks, and a bug of its kind is caught."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hyper_parallel.verify import verify_program

pytestmark = pytest.mark.platforms("torch")

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Stack:
    """A program of a stack.

    Attributes:
        packages: that must be installed.
        wrong: pattern of the first value that ``--broken`` makes wrong.
        pretend: the device that the CPU stands in for.
        program: name of its file, if it is another than the stack's.
        arguments: of the program.
        ranks: number of them.
        first: what runs once before, alone: a stack that compiles something then.
    """

    packages: tuple[str, ...]
    wrong: str
    pretend: str = ""
    program: str = ""
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    first: str = ""


_BUILD = "import deepspeed; deepspeed.init_distributed('gloo')"
STACKS = {
    "hf_trainer": Stack(("transformers", "accelerate"), "*"),
    "accelerate_ddp": Stack(("accelerate",), "2.weight"),
    "accelerate_fsdp2": Stack(("accelerate",), "*", "cuda"),
    "peft_lora": Stack(("peft", "transformers", "accelerate"), "*v_proj.lora_B*"),
    "fabric": Stack(("lightning",), "*"),
    "lightning_trainer": Stack(("lightning",), "*"),
    "deepspeed_zero_1": Stack(("deepspeed",), "2.weight", "", "deepspeed_zero", ("1",), first=_BUILD),
    "deepspeed_zero_2": Stack(("deepspeed",), "2.weight", "", "deepspeed_zero", ("2",), first=_BUILD),
    "deepspeed_zero_3": Stack(("deepspeed",), "2.weight", "", "deepspeed_zero", ("3",), first=_BUILD),
    "trl_sft": Stack(("trl", "transformers", "accelerate"), "*"),
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
    "megatron_distributed": Stack(("megatron",), "decoder.layers.1.mlp.linear_fc2.weight", "cuda"),
    "megatron_half": Stack(
        ("megatron",), "decoder.layers.1.mlp.linear_fc2.weight", "cuda", "megatron_distributed", ("half",)
    ),
    "megatron_pipeline": Stack(("megatron",), "embedding.word_embeddings.weight", "cuda"),
    "megatron_experts": Stack(("megatron",), "decoder.layers.*.mlp.experts.local_experts.*", "cuda"),
    "megatron_sequence": Stack(
        ("megatron",), "decoder.*layernorm.*", "cuda", "megatron_distributed", ("tensor",), ranks=4
    ),
}


def verified(name, *arguments):
    """Return the report of a program on its ranks; skip it if its stack is not installed."""
    stack = STACKS[name]
    missing = [package for package in stack.packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"[no-tool] {', '.join(missing)} is not installed: tox -e stacks")
    if stack.first:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
        subprocess.run([sys.executable, "-c", stack.first], env={**os.environ, **alone}, check=True)
    program = str(PROGRAMS / f"{stack.program or name}.py")
    return verify_program(program, stack.ranks, args=[*stack.arguments, *arguments], pretend=stack.pretend)


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_equal(name):
    """The program runs unmodified, and every value is compared and equal."""
    report = verified(name)
    assert report.status == 0, report.text()


@pytest.mark.parametrize("name", STACKS)
def test_a_bug_of_the_stack_is_caught(name):
    """A dropped or doubled reduction is reported, with the value that it makes wrong."""
    report = verified(name, "--broken")
    assert report.status == 1, report.text()
    assert fnmatch.fnmatch(report.verdict.first.name, STACKS[name].wrong), report.text()
