"""The table of styles in the guides."""

from __future__ import annotations

from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "styles.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="[no-tool] the guides are not installed")


def test_every_style_and_every_name_is_in_the_table():
    """Whoever looks for a style finds it, by class and by its name in plans of Transformers."""
    from hyper_parallel.core.tensor_parallel import styles
    from hyper_parallel.core.tensor_parallel.plan_names import STYLE_NAMES

    text = PAGE.read_text()
    classes = [name for name in styles.__all__ if name != "ParallelStyle"]
    assert len(classes) >= 7
    assert [name for name in classes if f"`{name}" not in text] == []
    assert [name for name in (*STYLE_NAMES, "local", "gather", "ep_router") if f"`{name}`" not in text] == []
