"""HTML pages of reports: one style, sortable tables, pictures; each page is one file without external assets."""

from __future__ import annotations

from hyper_parallel.verify.pages.meshes import layout_svg, mesh_svg
from hyper_parallel.verify.pages.render import page, render
from hyper_parallel.verify.pages.tables import Cell, Column, Value, table

__all__ = ["Cell", "Column", "Value", "layout_svg", "mesh_svg", "page", "render", "table"]
