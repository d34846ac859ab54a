"""MindSpore's names: random numbers, which depend on the global index of an element only."""

from __future__ import annotations

__all__ = ["IN_PLACE_REORDERED", "REORDERED"]

REORDERED = {
    "RandLikeExt": ("rand_like", "x, seed=None, offset=None, dtype=None, device=None"),
    "RandnLike": ("randn_like", "x, seed=None, offset=None, dtype=None, device=None"),
    "RandIntLike": ("randint_like", "x, low, high, seed=None, offset=None, dtype=None, device=None"),
    "MultinomialExt": ("multinomial", "x, num_samples, replacement=False, seed=None, offset=None"),
    "BernoulliExt": ("bernoulli", "x, seed=None, offset=None"),
}
IN_PLACE_REORDERED = {
    "InplaceUniform": ("uniform", "x, low=0.0, high=1.0, seed=None, offset=None"),
    "InplaceNormal": ("normal", "x, mean=0.0, std=1.0, seed=None, offset=None"),
    "InplaceBernoulliScalar": ("bernoulli_fill", "x, p=0.5, seed=None, offset=None"),
}
