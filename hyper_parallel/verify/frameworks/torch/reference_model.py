"""The reference transformer on PyTorch: ordinary single-device code without parallelism.

Shapes: B batch, L length, D dim, K key/value heads, G query heads per key/value head, H head_dim, F ffn, V vocab.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.verify.frameworks.contract.training import LanguageModelConfig, causal_mask, rotary_tables

__all__ = ["Regression", "Transformer", "loss", "train_one_step"]


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467), written out so that both frameworks agree."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Scale every token to unit mean square, then by the weight."""
        return x_BLD * torch.rsqrt((x_BLD * x_BLD).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: LanguageModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.groups, self.head_dim = config.heads // config.kv_heads, config.head_dim
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = nn.Linear(config.dim, wide, bias=config.bias, dtype=dtype)
        self.k = nn.Linear(config.dim, narrow, bias=config.bias, dtype=dtype)
        self.v = nn.Linear(config.dim, narrow, bias=config.bias, dtype=dtype)
        self.o = nn.Linear(wide, config.dim, bias=config.bias, dtype=dtype)

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor, mask_LL: Tensor) -> Tensor:
        """Attend to each token and the tokens before it."""
        q_BKGLH = self._heads(self.q(x_BLD), self.groups)
        k_BKGLH = self._heads(self.k(x_BLD), 1)
        v_BKGLH = self._heads(self.v(x_BLD), 1)
        q_BKGLH, k_BKGLH = _rotate(q_BKGLH, cos_LH, sin_LH), _rotate(k_BKGLH, cos_LH, sin_LH)
        scores_BKGLL = q_BKGLH @ k_BKGLH.transpose(-1, -2) * self.head_dim**-0.5
        mixed_BKGLH = torch.softmax(scores_BKGLL + mask_LL, -1) @ v_BKGLH
        batch, _, _, length, _ = mixed_BKGLH.shape
        return self.o(mixed_BKGLH.permute(0, 3, 1, 2, 4).reshape(batch, length, -1))

    def _heads(self, x: Tensor, groups: int) -> Tensor:
        batch, length, _ = x.shape
        return x.view(batch, length, -1, groups, self.head_dim).permute(0, 2, 3, 1, 4)


class SwiGLU(nn.Module):
    """The gated MLP (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: LanguageModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn, bias=config.bias, dtype=dtype)
        self.up = nn.Linear(config.dim, config.ffn, bias=config.bias, dtype=dtype)
        self.down = nn.Linear(config.ffn, config.dim, bias=config.bias, dtype=dtype)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Apply the up projection, the gate and the down projection."""
        return self.down(F.silu(self.gate(x_BLD)) * self.up(x_BLD))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and with a residual."""

    def __init__(self, config: LanguageModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.attn_norm, self.attn = _norm(config, dtype), Attention(config, dtype)
        self.mlp_norm, self.mlp = _norm(config, dtype), SwiGLU(config, dtype)

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor, mask_LL: Tensor) -> Tensor:
        """Run one block."""
        h_BLD = x_BLD + self.attn(self.attn_norm(x_BLD), cos_LH, sin_LH, mask_LL)
        return h_BLD + self.mlp(self.mlp_norm(h_BLD))


class Transformer(nn.Module):
    """Token numbers (B, L) to logits (B, L, V)."""

    cos: Tensor
    sin: Tensor
    mask: Tensor

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        dtype = getattr(torch, config.dtype)
        self.embed = nn.Embedding(config.vocab, config.dim, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, dtype) for _ in range(config.layers))
        self.norm = _norm(config, dtype)
        self.head = nn.Linear(config.dim, config.vocab, bias=False, dtype=dtype)
        if config.tied:
            self.head.weight = self.embed.weight
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", torch.tensor(cos))
        self.register_buffer("sin", torch.tensor(sin))
        self.register_buffer("mask", torch.tensor(causal_mask(config)))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        x_BLD = self.embed(tokens_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, self.cos, self.sin, self.mask)
        return self.head(self.norm(x_BLD))


def loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Return the mean cross-entropy; classes are moved to dim 1 for PyTorch, so that no dims must be merged."""
    return F.cross_entropy(logits_BLV.transpose(1, 2), labels_BL)


def _norm(config: LanguageModelConfig, dtype: torch.dtype) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.dim, config.eps, dtype)
    return nn.LayerNorm(config.dim, eps=config.eps, dtype=dtype)


def _rotate(x: Any, cos_LH: Tensor, sin_LH: Tensor) -> Any:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos_LH - second * sin_LH, second * cos_LH + first * sin_LH], -1)


# -- a regression that is trained as PyTorch's tutorials train: the bundled scenario ``3-tutorial`` -------------------


class Regression(nn.Module):
    """Two layers.

    Args:
        inputs, hidden, outputs: sizes of the layers.
        dtype: dtype of their parameters.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, dtype: Any) -> None:
        super().__init__()
        self.up, self.activation = nn.Linear(inputs, hidden, dtype=dtype), nn.Tanh()
        self.down = nn.Linear(hidden, outputs, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions (batch, outputs) of ``x`` (batch, inputs)."""
        return self.down(self.activation(self.up(x)))


def train_one_step(training: Any) -> Any:
    """Run forward, backward and the optimizer; save the model and load the checkpoint.

    Args:
        training: a :class:`~hyper_parallel.verify.training_loop.Training` of one batch: inputs and targets.

    Returns:
        the loss.
    """
    net, (inputs, targets) = training.model, training.batches[0]
    training.optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(inputs), targets)
    loss.backward()
    training.optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.pt"
        torch.save(net.state_dict(), path)
        net.load_state_dict(torch.load(path, weights_only=True))
    return loss
