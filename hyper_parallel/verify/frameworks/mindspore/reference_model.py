"""The reference transformer on MindSpore: ordinary single-device code without parallelism.

It has the same structure and parameter paths as on PyTorch. Functions without a kernel in MindSpore's CPU build
(float64 layer norm, embedding, log-softmax) are composed of other operators, so that one model runs on every device.
Shapes: B batch, L length, D dim, K key/value heads, G query heads per key/value head, H head_dim, F ffn, V vocab.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.dataset import NumpySlicesDataset

from hyper_parallel.verify.frameworks.contract.training import LanguageModelConfig, causal_mask, rotary_tables

__all__ = ["Embedding", "Regression", "Transformer", "loss", "train_one_step"]


class Embedding(mint.nn.Embedding):
    """Embedding by ``gather``, which every device supports."""

    def construct(self, ids_BL: Any) -> Any:
        """Return the rows ``ids`` of the weight."""
        return ops.gather(self.weight, ids_BL, 0)


class RMSNorm(nn.Cell):
    """Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467); MindSpore has no such cell."""

    def __init__(self, dim: int, eps: float, dtype: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Parameter(mint.ones(dim, dtype=dtype))

    def construct(self, x_BLD: Any) -> Any:
        """Scale every token to unit mean square, and multiply by the weight."""
        return x_BLD * mint.rsqrt(mint.mean(x_BLD * x_BLD, -1, True) + self.eps) * self.weight


class LayerNorm(nn.Cell):
    """Layer norm (Ba et al., arXiv 1607.06450) from basic operators, because the CPU kernel lacks float64."""

    def __init__(self, dim: int, eps: float, dtype: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Parameter(mint.ones(dim, dtype=dtype))
        self.bias = Parameter(mint.zeros(dim, dtype=dtype))

    def construct(self, x_BLD: Any) -> Any:
        """Normalize every token to zero mean and unit variance, and apply the affine map."""
        centred_BLD = x_BLD - mint.mean(x_BLD, -1, True)
        variance_BL1 = mint.mean(centred_BLD * centred_BLD, -1, True)
        return centred_BLD * mint.rsqrt(variance_BL1 + self.eps) * self.weight + self.bias


class Attention(nn.Cell):
    """Causal attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: LanguageModelConfig, dtype: Any) -> None:
        super().__init__()
        self.groups, self.head_dim = config.heads // config.kv_heads, config.head_dim
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = mint.nn.Linear(config.dim, wide, bias=config.bias, dtype=dtype)
        self.k = mint.nn.Linear(config.dim, narrow, bias=config.bias, dtype=dtype)
        self.v = mint.nn.Linear(config.dim, narrow, bias=config.bias, dtype=dtype)
        self.o = mint.nn.Linear(wide, config.dim, bias=config.bias, dtype=dtype)

    def construct(self, x_BLD: Any, cos_LH: Any, sin_LH: Any, mask_LL: Any) -> Any:
        """Attend to each token and the tokens before it."""
        q_BKGLH = self._heads(self.q(x_BLD), self.groups)
        k_BKGLH = self._heads(self.k(x_BLD), 1)
        v_BKGLH = self._heads(self.v(x_BLD), 1)
        q_BKGLH, k_BKGLH = _rotate(q_BKGLH, cos_LH, sin_LH), _rotate(k_BKGLH, cos_LH, sin_LH)
        scores_BKGLL = mint.matmul(q_BKGLH, mint.transpose(k_BKGLH, -1, -2)) * self.head_dim**-0.5
        mixed_BKGLH = mint.matmul(mint.nn.functional.softmax(scores_BKGLL + mask_LL, dim=-1), v_BKGLH)
        batch, _, _, length, _ = mixed_BKGLH.shape
        return self.o(mint.reshape(mint.permute(mixed_BKGLH, (0, 3, 1, 2, 4)), (batch, length, -1)))

    def _heads(self, x: Any, groups: int) -> Any:
        batch, length, _ = x.shape
        return mint.permute(mint.reshape(x, (batch, length, -1, groups, self.head_dim)), (0, 2, 3, 1, 4))


class SwiGLU(nn.Cell):
    """The gated MLP (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: LanguageModelConfig, dtype: Any) -> None:
        super().__init__()
        self.gate = mint.nn.Linear(config.dim, config.ffn, bias=config.bias, dtype=dtype)
        self.up = mint.nn.Linear(config.dim, config.ffn, bias=config.bias, dtype=dtype)
        self.down = mint.nn.Linear(config.ffn, config.dim, bias=config.bias, dtype=dtype)

    def construct(self, x_BLD: Any) -> Any:
        """Apply the up projection, the gate and the down projection."""
        return self.down(mint.nn.functional.silu(self.gate(x_BLD)) * self.up(x_BLD))


class Block(nn.Cell):
    """Attention and MLP, each behind a norm and with a residual."""

    def __init__(self, config: LanguageModelConfig, dtype: Any) -> None:
        super().__init__()
        self.attn_norm, self.attn = _norm(config, dtype), Attention(config, dtype)
        self.mlp_norm, self.mlp = _norm(config, dtype), SwiGLU(config, dtype)

    def construct(self, x_BLD: Any, cos_LH: Any, sin_LH: Any, mask_LL: Any) -> Any:
        """Run one block."""
        h_BLD = x_BLD + self.attn(self.attn_norm(x_BLD), cos_LH, sin_LH, mask_LL)
        return h_BLD + self.mlp(self.mlp_norm(h_BLD))


class Transformer(nn.Cell):
    """Transformer from token numbers (B, L) to logits (B, L, V)."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        dtype = getattr(ms, config.dtype)
        self.embed = Embedding(config.vocab, config.dim, dtype=dtype)
        self.layers = nn.CellList([Block(config, dtype) for _ in range(config.layers)])
        self.norm = _norm(config, dtype)
        self.head = mint.nn.Linear(config.dim, config.vocab, bias=False, dtype=dtype)
        if config.tied:
            self.head.weight = self.embed.weight
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", Tensor(cos))
        self.register_buffer("sin", Tensor(sin))
        self.register_buffer("mask", Tensor(causal_mask(config)))

    def construct(self, tokens_BL: Any) -> Any:
        """Return the logits of the next token at every position."""
        x_BLD = self.embed(tokens_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, self.cos, self.sin, self.mask)
        return self.head(self.norm(x_BLD))


def loss(logits_BLV: Any, labels_BL: Any) -> Any:
    """Return the mean cross-entropy; classes are moved to dim 1 for MindSpore, so that no dims must be merged."""
    return ops.cross_entropy(mint.transpose(logits_BLV, 1, 2), labels_BL)


def _norm(config: LanguageModelConfig, dtype: Any) -> Any:
    return (RMSNorm if config.norm == "rms" else LayerNorm)(config.dim, config.eps, dtype)


def _rotate(x: Any, cos_LH: Any, sin_LH: Any) -> Any:
    first, second = mint.chunk(x, 2, -1)
    return mint.cat([first * cos_LH - second * sin_LH, second * cos_LH + first * sin_LH], -1)


# -- a regression that is trained as MindSpore's tutorials train: the bundled scenario ``3-tutorial`` -----------------


class Regression(nn.Cell):
    """Two layers.

    Args:
        inputs, hidden, outputs: sizes of the layers.
        dtype: dtype of their parameters.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, dtype: Any) -> None:
        super().__init__()
        self.arguments = inputs, hidden, outputs, dtype
        self.up, self.activation = nn.Dense(inputs, hidden, dtype=dtype), nn.Tanh()
        self.down = nn.Dense(hidden, outputs, dtype=dtype)

    def construct(self, x: Tensor) -> Tensor:
        """Return predictions (batch, outputs) of ``x`` (batch, inputs)."""
        return self.down(self.activation(self.up(x)))


class _Losses(ms.Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []

    def on_train_step_end(self, run_context: Any) -> None:
        """Keep the result of the training step."""
        self.losses.append(run_context.original_args().net_outputs)


def train_one_step(training: Any) -> Any:
    """Run ``Model.train`` on a dataset of one batch, save the model, and evaluate a second one that loads the file.

    The optimizer is created before the first forward; ``TrainOneStepCell`` calls it, and a callback keeps the loss. The
    trained model itself does not load the checkpoint, because on one device MindSpore 2.10's compiled optimizers
    continue to write to a parameter's previous tensor.

    Args:
        training: a :class:`~hyper_parallel.verify.training_loop.Training` of one batch: inputs and targets.

    Returns:
        the loss of the step, plus the loss of the model from the checkpoint.
    """
    losses, net, batch = _Losses(), training.model, training.batches[0]
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, _squared_error), training.optimizer)
    data = NumpySlicesDataset(tuple(tensor.asnumpy() for tensor in batch), ["inputs", "targets"], shuffle=False)
    ms.Model(cell).train(1, data.batch(len(batch[0])), callbacks=[losses], dataset_sink_mode=False)
    return losses.losses[-1] + _squared_error(_restored(net)(batch[0]), batch[1])


def _restored(net: Any) -> Regression:
    """Save a checkpoint of ``net``; return a new model with plain parameters that has loaded it."""
    other = Regression(*net.arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "net.ckpt")
        ms.save_checkpoint(net, path)
        ms.load_param_into_net(other, ms.load_checkpoint(path))
    return other


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error; ``nn.MSELoss`` would compute float64 in float32."""
    return mint.mean(mint.square(output - target))
