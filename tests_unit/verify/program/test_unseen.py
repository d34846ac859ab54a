"""Programs of an author who had not read the harness: right ones are equal, and those with one bug differ where it is.

A script's first line, ``# world: N``, says on how many ranks it runs; a family has such a line for each of its
settings, with the script's arguments, and its bugs are single changes. Right ones train alike on one rank and on N, as
plain runs over gloo show; each of the others has one bug of a public report. What its numbers are wrong in first was
written down, in words, before the harness had seen it.
"""

import re
from pathlib import Path

import pytest

from hyper_parallel.verify import verify_program

# Nightly: each is a whole training. The classes that they are of have small programs of their own in this room.
pytestmark = [pytest.mark.platforms("torch"), pytest.mark.sweep]

_FOLDER = Path(__file__).with_name("unseen")

FIRST = {
    "b01_uneven_shares_mean": ("loss", "loss", 0),
    "b03_final_norm_grad_not_reduced_sp": ("gradient", "final_norm.weight", 0),
    "b04_row_bias_grad_not_reduced_sp": ("gradient", "layers.2.dense_bias", 0),
    "b05_missing_copy_to_tp": ("gradient", "blocks.1.ln2.weight", 0),
    "b06_row_bias_added_on_every_rank": None,
    "b07_all_reduce_of_a_contiguous_copy": ("gradient", "norm.weight", 0),
    "b08_clip_by_local_norm": ("gradient", "optimizer 0, parameter 0", 0),
    "b09_zero1_tail_dropped": None,
    "b10_zero3_sum_for_average": ("gradient", "ShardedLinear#3.shard", 0),
    "b11_tied_embedding_not_synced": ("gradient", "embedding.weight", 0),
    "b12_pipeline_loss_not_divided": ("loss", "loss", 0),
    "b13_positions_local_under_cp": ("output", "pos", 0),
    "b14_ring_causal_mask_local": ("output", "blocks.0.o", 0),
    "b15_ring_backward_wrong_direction": ("gradient", "blocks.1.qkv.weight", 0),
    "b16_expert_grads_scaled_by_ep": ("gradient", "moe.w1", 0),
    "b17_router_grad_not_reduced": ("gradient", "moe.router.weight", 0),
    "b18_gather_without_gradient": ("gradient", "text.2.weight", 0),
    "b19_fsdp2_local_clip": ("gradient", "output.weight", 0),
    "b20_ddp_bypassed": ("gradient", "head.weight", 0),
    "b21_sync_on_first_micro_batch": ("gradient", "fc.weight", 0),
    "b22_data_split_by_global_rank": ("output", "1.w2", 0),
    "b23_hsdp_mesh_without_replicate": ("gradient", "2.out.weight", 0),
    "b24_zero2_shard_offset": None,
    "b25_lr_plateau_on_local_loss": ("rate", "optimizer 0, group 0", 5),
    "b26_ema_of_unsynced_init": None,
    "b27_found_inf_not_reduced": None,
    "b28_adafactor_column_stats_local": ("weight", "0.weight", 0),
    "b29_lamb_trust_ratio_local": ("weight", "0.weight", 0),
    "b30_muon_gradient_not_reduced": ("gradient", "8.weight", 0),
    "b31_gan_same_noise_on_all_ranks": ("output", "0 (no_grad)", 0),
    "b32_dpo_gradients_summed": ("gradient", "Policy.head.weight", 0),
    "b33_syncbn_backward_not_reduced": ("gradient", "4.weight", 0),
    "b34_syncbn_running_var_local_count": ("buffer", "1.running_var", 0),
    "b35_halo_without_gradient": ("gradient", "4.weight", 0),
    "b36_norm_missing_in_tp_plan": ("gradient", "layers.1.ffn_norm.weight", 0),
    "b67_reduce_bf16_grad_after_accumulation": ("gradient", "optimizer 0, parameter 0", 0),
}
"""What is wrong first in each program with a bug: kind, name and step; None where the harness names another value, or
finds it in float32."""

SETTINGS = [
    (path.stem, int(world), arguments)
    for path in sorted((_FOLDER / "families").glob("*.py"))
    for world, arguments in re.findall(r"^# world: (\d+) ?(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
]
"""Every setting of every family."""

CHANGES = {
    "targets_of_other_samples": (
        ("ddp_groups", 3, "--batch 18"),
        {"        with auto:\n": "        my = torch.roll(my, rank)\n            with auto:\n"},
        ("loss", "loss", 0),
    ),
    "balance_loss_of_local_tokens": (
        ("moe_choice", 3, ""),
        {
            "Sum.apply(nn.functional.one_hot(top, E).float().sum((0, 1)))": "nn.functional.one_hot(top, E).float()"
            ".sum((0, 1))",
            "mean = Sum.apply(prob.sum(0)) / total": "mean = prob.mean(0) / world",
            "(load / (total * a.topk) * mean)": "(load / (len(x) * a.topk) * mean)",
        },
        ("output", "m1[1]", 0),
    ),
    "ring_with_the_mask_of_its_own_documents": (
        ("ring_window", 3, "--docs 1"),
        {"doc[:, kpos][:, None, :]": "mydoc[:, None, :]"},
        ("output", "Attention.out", 0),
    ),
    "targets_shifted_in_each_part": (
        ("ring_window", 3, ""),
        {"y = t[:, :-1][:, sl], t[:, 1:][:, sl]": "y = t[:, :-1][:, sl], t[:, :-1][:, sl].roll(-1, 1)"},
        ("loss", "loss", 0),
    ),
}
"""Bugs in families: the setting, what is replaced by what, and what is wrong first."""


def verdict_of(kind, name):
    """Return the report of a script."""
    script = _FOLDER / kind / f"{name}.py"
    world = re.match(r"# world: (\d+)", script.read_text(encoding="utf-8"))
    return verify_program(str(script), int(world[1]))


@pytest.mark.parametrize("name", sorted(path.stem for path in (_FOLDER / "right").glob("*.py")))
def test_right_programs_are_equal(name):
    """A program that trains alike on one rank and on several is equal, whoever has written it."""
    report = verdict_of("right", name)
    assert report.status == 0, report.text()


@pytest.mark.parametrize("name", sorted(path.stem for path in (_FOLDER / "bugs").glob("*.py")))
def test_bugs_are_found_where_they_are(name):
    """A program with a bug differs, and the value that is wrong first is named."""
    report = verdict_of("bugs", name)
    assert report.status == 1, report.text()
    first = report.verdict.first
    assert FIRST[name] is None or FIRST[name] == (first.kind, first.name, first.step), report.text()


@pytest.mark.parametrize("name, world, arguments", SETTINGS)
def test_families_are_equal(name, world, arguments):
    """A program that trains alike on one rank and on several is equal in every setting."""
    report = verify_program(str(_FOLDER / "families" / f"{name}.py"), world, args=arguments.split())
    assert report.status == 0, report.text()


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_families_are_found(tmp_path, name):
    """One wrong line is found, and the value that is wrong first is named."""
    (family, world, arguments), changes, expected = CHANGES[name]
    text = (_FOLDER / "families" / f"{family}.py").read_text(encoding="utf-8")
    for right, wrong in changes.items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    script = tmp_path / f"{name}.py"
    script.write_text(text, encoding="utf-8")
    report = verify_program(str(script), world, args=arguments.split())
    assert report.status == 1, report.text()
    first = report.verdict.first
    assert expected == (first.kind, first.name, first.step), report.text()
