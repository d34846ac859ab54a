"""The README's pictures exist and are small, and their command reports mistakes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "ci" / "screenshots.py"
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="[no-tool] the README is not installed")


@pytest.fixture
def screenshots(monkeypatch, tmp_path, script):
    """The script, writing into a folder of its own."""
    module = script("screenshots")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_pictures_of_the_readme_are_there_and_small():
    """Every picture of the README exists, has an alternative text, and is under 150 KB."""
    pictures = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", README.read_text())
    assert {path for _, path in pictures} == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.png")} | {
        "docs/first-run.svg"
    }
    assert all(0 < (ROOT / path).stat().st_size < 150 * 1024 for _, path in pictures)


def test_mistakes_are_reported(screenshots, monkeypatch, tmp_path, capsys):
    """A missing browser, a missing page and a picture that is too large each give one line and status 2."""
    monkeypatch.setattr(screenshots.shutil, "which", lambda _: None)
    assert screenshots.main(["a.html:a:9x9"]) == 2
    assert capsys.readouterr().err == "screenshots: Chromium is not installed\n"
    browser = tmp_path / "browser"
    write = 'case "$one" in --screenshot=*) head -c 200000 /dev/zero > "${one#*=}"; esac'
    browser.write_text(f"#!/bin/sh\nfor one; do {write}; done\n")
    browser.chmod(0o755)
    monkeypatch.setattr(screenshots.shutil, "which", lambda _: str(browser))
    assert screenshots.main([f"{tmp_path / 'a.html'}:a:9x9"]) == 2
    assert capsys.readouterr().err == f"screenshots: {tmp_path / 'a.html'} is not there; write it first\n"
    (tmp_path / "a.html").write_text("")
    assert screenshots.main([f"{tmp_path / 'a.html'}:a:9x9"]) == 2
    message = f"{tmp_path / 'docs' / 'a.png'} has 200000 bytes, more than 153600: ask for less of the page"
    assert capsys.readouterr().err == f"screenshots: {message}\n"
    assert screenshots.main([]) == 2
    assert "python ci/screenshots.py PAGE.html:NAME:WIDTHxHEIGHT" in capsys.readouterr().err
