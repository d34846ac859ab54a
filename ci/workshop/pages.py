"""Pages from the workshop's templates, in the style of the harness."""

from __future__ import annotations

from hyper_parallel.verify.pages.render import renderer

__all__ = ["render"]

render = renderer("workshop")
