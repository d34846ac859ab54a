"""The facts of every bug: the error, its public report, and the expected first difference and cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["FACTS", "Facts"]


@dataclass(frozen=True)
class Facts:
    """The documented facts of a bug.

    Attributes:
        name: name of its function.
        module: module with the function, in the folder of each framework.
        sentence: description of the error.
        source: repository and number of the public report.
        mesh: sizes by name of axis; their product is the number of ranks.
        kind: kind of the first wrong value, one of ``KINDS``, or ``calls`` if ranks call different collectives.
        tensor: pattern that the name of the first wrong value matches, as in ``fnmatch``: ``*`` if all values of the
            kind are wrong at once.
        cause: class of the error, one of ``CAUSES``.
        frameworks: frameworks that have the program.
        other_tensors: patterns instead of ``tensor``, by framework.
        declared: placements that cannot be read or inferred, by pattern of names.
        single_device_has_it: whether the broken form is also wrong on a single device, so that it is compared with the
            fixed form.
    """

    name: str
    module: str
    sentence: str
    source: str
    mesh: Mapping[str, int]
    kind: str
    tensor: str
    cause: str
    frameworks: tuple[str, ...] = ("torch",)
    other_tensors: Mapping[str, str] = field(default_factory=dict)
    declared: Mapping[str, str] = field(default_factory=dict)
    single_device_has_it: bool = False


_BOTH = ("torch", "mindspore")

FACTS = (
    Facts("sequence_parallel_norm", "gradients",
          "The gradient of the final norm is not summed over the ranks of the sequence.",
          "Megatron-LM 1446", {"tp": 3}, "gradient", "final_norm.*", "missing-reduction", _BOTH,
          other_tensors={"mindspore": "final_norm.weight"}),
    Facts("shared_norm_of_heads", "gradients",
          "All heads share one norm weight, but each rank's gradient covers its own heads only.",
          "Megatron-LM 7452 (11)", {"tp": 3}, "gradient", "heads_norm.weight", "missing-reduction", _BOTH),
    Facts("projection_reduced_twice", "gradients",
          "The gradient of some rows of a projection is summed over the ranks twice.",
          "AReno 496", {"tp": 3}, "gradient", "kv_a.weight", "components", _BOTH),
    Facts("one_kv_head", "gradients", "Sharded queries read one key-value head, whose gradients stay partial.",
          "bigcode Megatron-LM 11, 36, 37", {"tp": 3}, "gradient", "kv.bias", "missing-reduction", _BOTH),
    Facts("router_weight", "gradients",
          "Ranks route different tokens, and the router's gradient is not summed over them.",
          "Megatron-LM 599", {"tp": 3}, "gradient", "router.weight", "missing-reduction", _BOTH),
    Facts("experts_input_gradient", "gradients",
          "The gradient of the sharded experts' input is sliced instead of reduce-scattered.",
          "torchtitan 1805", {"tp": 3}, "gradient", "embed.weight", "missing-reduction", _BOTH),
    Facts("all_reduce_without_backward", "gradients",
          "A plain all-reduce in the forward drops the other ranks' gradients in the backward.",
          "ms-swift 9947", {"tp": 3}, "gradient", "head.weight", "missing-reduction"),
    Facts("axis_of_size_one", "gradients",
          "Gradients are reduced only over a shard axis of size one, so replicas are never averaged.",
          "verl 7493", {"replicate": 3, "shard": 1}, "gradient", "*", "missing-reduction", _BOTH),
    Facts("branch_on_rank", "gradients",
          "A branch leaves a parameter without gradient on some ranks, whose optimizers skip it.",
          "pytorch 174862", {"dp": 3}, "gradient", "picture.weight", "no-gradient"),
    Facts("bias_on_every_rank", "gradients", "Every rank adds the bias of a row-parallel linear before the sum.",
          "text-generation-inference 1036", {"tp": 3}, "output", "down", "repeated-reduction", _BOTH,
          other_tensors={"mindspore": "down*"}),
    Facts("average_for_sum", "losses", "A loss that counts all ranks' tokens is averaged over the ranks once more.",
          "NeMo Automodel 3822", {"dp": 3}, "gradient", "*", "average-for-sum", _BOTH),
    Facts("local_token_count", "losses", "Each part of a sequence divides its loss by its own number of valid tokens.",
          "Megatron-LM 7513", {"cp": 3}, "loss", "loss", "scaled-by-count", _BOTH, other_tensors={"mindspore": "*"}),
    Facts("context_parallel_scale", "losses",
          "The loss is multiplied by the size of an axis over which gradients are summed.",
          "Megatron-LM 673", {"dp": 2, "cp": 3}, "gradient", "*", "scaled-by-size", _BOTH),
    Facts("token_counts_over_wrong_axes", "losses",
          "Token counts are summed over the data axis only, although the sequence is sharded, too.",
          "verl 5983", {"dp": 2, "cp": 3}, "loss", "loss", "scaled-by-count", _BOTH),
    Facts("smoothing_by_local_vocabulary", "losses", "Label smoothing averages over the local part of the vocabulary.",
          "Megatron-LM 737", {"tp": 3}, "output", "criterion", "missing-reduction"),
    Facts("unequal_valid_tokens", "losses", "Micro-steps with unequal numbers of valid tokens count alike.",
          "transformers 34191", {"dp": 3}, "loss", "loss", "scaled-by-count", _BOTH, single_device_has_it=True),
    Facts("auxiliary_loss_by_sizes", "losses",
          "The weight of a router's auxiliary loss depends on the number of ranks.",
          "Megatron-LM 5047", {"tp": 3}, "output", "router*", "scaled-by-size"),
    Facts("loss_parallel_backward", "losses",
          "The backward of a sharded log_softmax is left to a fused loss, but the program calls another one.",
          "pytorch 190746", {"tp": 3}, "gradient", "head.weight", "backward", single_device_has_it=True),
    Facts("rank_of_another_group", "inputs",
          "A rank picks its tokens by its rank in another group; equal group sizes hid it.",
          "torchtitan 2842", {"ep": 2, "tp": 3}, "output", "moe*", "permuted", _BOTH),
    Facts("mask_over_wrong_group", "inputs", "A padding mask is cut for the ranks of another group of the same size.",
          "Megatron-LM 5563", {"tp": 3, "dp": 2}, "output", "router", "components"),
    Facts("equal_positions", "inputs", "All ranks of a sharded sequence use the positions of the first part.",
          "SpecForge 563", {"sp": 3}, "output", "positions", "permuted", _BOTH),
    Facts("uneven_boundaries", "inputs",
          "Two tensors with equal placements and different boundaries are multiplied in parts.",
          "physicsnemo 1943", {"domain": 3}, "output", "scale", "components"),
    Facts("dropout_stream_per_rank", "inputs", "Ranks that hold the same activations draw dropout masks of their own.",
          "Megatron-LM 4828", {"tp": 3}, "mask", "dropout", "random-differs", _BOTH),
    Facts("dropout_stream_shared", "inputs", "Ranks that hold different tokens draw the same dropout mask.",
          "Megatron-LM 4828", {"cp": 3}, "output", "dropout", "random-shared"),
    Facts("dropout_in_evaluation", "inputs", "Dropout stays active in evaluation.",
          "transformers 33844", {"dp": 3}, "output", "attention.dropout*", "random-differs", single_device_has_it=True),
    Facts("all_to_all_unequal", "inputs", "A rank without tokens for the experts leaves out their all-to-all.",
          "DeepSpeed 5794", {"ep": 3}, "calls", "*", "unequal-calls", _BOTH),
    Facts("clipping_by_local_norm", "state",
          "Every rank clips by the norm of what it holds, so replicas drift from the second step.",
          "DeepSpeed 1801", {"tp": 3}, "norm", "gradient norm", "norm-local", _BOTH, other_tensors={"mindspore": "*"}),
    Facts("expert_norm_over_wrong_group", "state",
          "The gradient norm omits experts, because it treats them as replicas over the dense weights' group.",
          "Megatron-LM 5916", {"ep": 3}, "norm", "gradient norm", "norm-local"),
    Facts("replicas_counted_in_norm", "state", "Replicated weights count once per rank in the gradient norm.",
          "TransformerEngine 715 of ROCm", {"tp": 3}, "norm", "gradient norm", "norm-counted-twice"),
    Facts("infinity_norm_summed", "state",
          "The maximum norm of shards is summed over the ranks, like powers of other norms.",
          "torchtitan 596", {"tp": 3}, "norm", "gradient norm", "norm-counted-twice"),
    Facts("optimizer_of_unsharded_parameters", "state",
          "The optimizer holds the parameters from before sharding, and the model never learns.",
          "accelerate 2665", {"dp": 3}, "weight", "0.weight", "not-updated", _BOTH,
          other_tensors={"mindspore": "layer.weight"}),
    Facts("hooks_lost", "state", "Hooks that reduce gradients stay on parameters that a second wrapping has replaced.",
          "pytorch 104336", {"dp": 3}, "gradient", "head.layer.weight", "missing-reduction"),
    Facts("stage_local_names", "state",
          "A checkpoint names layers by their index in the stage, so later stages load the layers of the first stage.",
          "Megatron-LM 7452", {"pp": 3}, "weight", "layers.2.weight", "permuted"),
    Facts("empty_shards_lost", "state",
          "A checkpoint does not keep empty shards, and their rank does not take part in loading.",
          "pytorch 108869", {"fsdp": 4}, "calls", "*", "unequal-calls"),
    Facts("implicit_redistribution", "state",
          "Copying a loaded tensor into a parameter redistributes it, and ranks copy in different orders.",
          "VeOmni 642", {"fsdp": 3}, "calls", "*", "unequal-calls"),
)  # fmt: skip
