"""The colours of every page, light and dark, as data: the tests compute their contrast."""

from __future__ import annotations

__all__ = ["DARK", "LIGHT"]

LIGHT = {
    "page": "#ffffff",
    "panel": "#f5f7fa",
    "text": "#1b2430",
    "quiet": "#526070",
    "line": "#c9d1db",
    "link": "#0b57b7",
    "good": "#1b6b2e",
    "bad": "#b3201f",
    "warn": "#8a4b00",
    "one": "#0b57b7",  # series and bars
    "two": "#b3480a",
    "three": "#1b6b2e",
    "four": "#7a2fa0",
    "five": "#00686f",
    "six": "#a01a5b",
}

DARK = {
    "page": "#12161c",
    "panel": "#1b222b",
    "text": "#e4e9ef",
    "quiet": "#a3b0be",
    "line": "#3b4653",
    "link": "#8ab8ff",
    "good": "#86d79a",
    "bad": "#ff9a94",
    "warn": "#f0bd72",
    "one": "#8ab8ff",
    "two": "#ffae70",
    "three": "#86d79a",
    "four": "#d3a6f2",
    "five": "#6fd6dd",
    "six": "#ff9ec8",
}
