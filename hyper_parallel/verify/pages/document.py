"""One page: style and script inside it, nothing fetched from anywhere."""

from __future__ import annotations

from functools import cache
from importlib import resources

from hyper_parallel.verify.pages import palette
from hyper_parallel.verify.pages.markup import Html, escape

__all__ = ["page"]

# Says to the browser what the tests say to us: a page asks for nothing outside itself.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, body: Html | str, *, footer: str = "") -> str:
    """A whole HTML document.

    Args:
        title: of the window, and the heading of the page.
        body: markup under the heading.
        footer: a line at the end, such as the command that wrote the page.
    """
    foot = f"<footer>{escape(footer)}</footer>" if footer else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{palette.css()}{_asset('page.css')}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{body}\n{foot}</main>\n"
        f"<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


@cache
def _asset(name: str) -> str:
    return resources.files("hyper_parallel.verify.pages").joinpath(name).read_text(encoding="utf-8")
