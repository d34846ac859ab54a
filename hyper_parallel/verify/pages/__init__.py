"""Pages that people look at: one style, tables that sort and filter, pictures; one file each, no external assets."""

from __future__ import annotations

from hyper_parallel.verify.pages.document import page
from hyper_parallel.verify.pages.markup import Html, escape
from hyper_parallel.verify.pages.meshes import layout_svg, mesh_svg
from hyper_parallel.verify.pages.tables import Cell, Column, Value, table

__all__ = ["Cell", "Column", "Html", "Value", "escape", "layout_svg", "mesh_svg", "page", "table"]
