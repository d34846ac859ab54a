"""Renders pages by jinja2 from ``templates/``: text is escaped, Markup is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from hyper_parallel.verify.pages.document import linked
from hyper_parallel.verify.pages.svg import DARK, LIGHT
from hyper_parallel.verify.report import run_header

__all__ = ["page", "render", "renderer"]

_OWN = "hyper_parallel.verify.pages"
_UNSHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and those that change the direction of text, which could disguise a name."""


def page(title: str, body: Markup | str, *, footer: str = "") -> str:
    """Return a complete HTML document, including style and script.

    Args:
        title: title of the window and heading of the page.
        body: content under the heading; a str is text, Markup is markup.
        footer: a line at the end, such as the command that wrote the page.
    """
    return str(render("page.html", title=title, body=body, footer=footer))


def renderer(package: str) -> Callable[..., Markup]:
    """Return a function that renders a template of ``package``, or of this package, with values.

    Values other than Markup are escaped. Control characters are escaped in all values.
    """

    def render(template: str, **values: Any) -> Markup:
        text = _environment(package).get_template(template).render(values)
        text = _UNSHOWN.sub(lambda letter: letter[0].encode("unicode_escape").decode(), text)
        if text.startswith("<!doctype"):
            text = linked(text)
        return Markup(text)  # noqa: S704 - escaped by the template

    return render


@cache
def _environment(package: str) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in dict.fromkeys((package, _OWN))]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(light=LIGHT, dark=DARK, header=lambda: run_header().facts())
    return environment


render = renderer(_OWN)
