"""The project's prose keeps to docs/style.md: none of its worst words for users, and no more than now elsewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="[no-tool] the pages are not installed")

WORDS = {
    "beside": "next to, with, or compared with",
    "besides": "also",
    "cards?": "device",
    "earned": "measured",
    "in the place of": "instead of",
    "mend(?:s|ed)?": "fix",
    "(?:is|are) told": "is reported, or: the report says",
    "(?:is|are) held (?:to|against)": "is compared with",
    "lie on each other": "coincide",
    "(?<!there )(?:is|are) no (?:number|report|file|folder|module|fault|name|mesh|tensor)": "is not a",
}
FOR_USERS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs" / "devices" / "README.md",
    *sorted((ROOT / "hyper_parallel" / "cli").glob("*.py")),
]
ALLOWED = {"docs/style.md"}
"""The page that lists the words."""

CEILINGS = {
    "hyper_parallel": 0,
    "ci": 0,
}
"""Uses of these words under a folder, all of them together: lower a number when a text is rewritten, never raise it."""


def found(path):
    """Yield line, word and what to write, for each bad word in a file."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for word, better in WORDS.items():
            for match in re.finditer(rf"\b{word}\b", line, re.IGNORECASE):
                yield f"{path.relative_to(ROOT)}:{number}: {match[0]!r}; write: {better}"


def test_what_users_read_has_none_of_the_worst_words():
    """README, guides and the command line say it in words of the field."""
    assert [place for path in FOR_USERS if str(path.relative_to(ROOT)) not in ALLOWED for place in found(path)] == []


@pytest.mark.parametrize("folder", CEILINGS)
def test_the_worst_words_become_fewer(folder):
    """In the sources, their rooms' pages and their comments the count of these words only falls."""
    files = [
        path for kind in ("*.py", "*.md") for path in (ROOT / folder).rglob(kind) if "changelog.d" not in path.parts
    ]
    places = [place for path in sorted(files) for place in found(path)]
    assert len(places) <= CEILINGS[folder], f"{len(places)}, more than {CEILINGS[folder]}; see docs/style.md"
