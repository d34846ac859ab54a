"""`ci/sbom.py` and `ci/advisories.py`: what is installed, and which advisories it is affected by."""

import json
from importlib import metadata

import pytest


def sbom(tmp_path, *packages):
    """Write an SBOM of names with versions."""
    path = tmp_path / "sbom.json"
    path.write_text(json.dumps({"components": [{"purl": f"pkg:pypi/{package}"} for package in packages]}))
    return path


def advisory(name, ident="PYSEC-1", **affected):
    """Return an advisory of a package of PyPI."""
    return {
        "id": ident,
        "summary": "a hole",
        "affected": [{"package": {"ecosystem": "PyPI", "name": name}, **affected}],
    }


def span(*events):
    """Return a range of versions."""
    return [{"type": "ECOSYSTEM", "events": list(events)}]


@pytest.fixture
def check(script, tmp_path, capsys):
    """Return a function that compares packages with advisories: the status and the lines that are printed."""
    pytest.importorskip("packaging", reason="[no-tool] packaging is not installed")
    module = script("advisories")

    def run(packages, content):
        path = tmp_path / "advisories.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        status = module.main([str(sbom(tmp_path, *packages)), str(path)])
        captured = capsys.readouterr()
        return status, captured.out.splitlines() or captured.err.splitlines()

    return run


def test_everything_installed_is_in_the_document(script, tmp_path, capsys):
    """Every distribution is a component with its version and package URL, and refers to others that are there."""
    path = tmp_path / "reports" / "sbom.json"
    module = script("sbom")
    assert module.main([str(path)]) == 0
    document = json.loads(path.read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    versions = {entry["name"]: entry["version"] for entry in document["components"]}
    assert versions["pytest"] == metadata.version("pytest")
    assert set(versions) == {module.normal(found.metadata["Name"]) for found in metadata.distributions()}
    known = {entry["bom-ref"] for entry in document["components"]}
    (pytests,) = [entry for entry in document["dependencies"] if entry["ref"].startswith("pkg:pypi/pytest@")]
    assert f"pkg:pypi/pluggy@{versions['pluggy']}" in pytests["dependsOn"]
    assert all(set(entry["dependsOn"]) <= known for entry in document["dependencies"])
    assert capsys.readouterr().out == f"{path}: {len(versions)} packages\n"
    first = path.read_bytes()
    assert module.main([str(path)]) == 0
    assert path.read_bytes() == first


def test_an_sbom_that_cannot_be_written(script, tmp_path, capsys):
    """A wrong call and a file that cannot be written are status 2."""
    (tmp_path / "file").write_text("")
    module = script("sbom")
    assert module.main([]) == 2
    assert module.main([str(tmp_path / "file" / "sbom.json")]) == 2
    assert capsys.readouterr().err.count("sbom: ") == 2


@pytest.mark.parametrize(
    "version, affected, status",
    [
        ("1.5", {"ranges": span({"introduced": "0"}, {"fixed": "2.0"})}, 1),
        ("2.0", {"ranges": span({"introduced": "0"}, {"fixed": "2.0"})}, 0),
        ("2.0+cpu", {"ranges": span({"introduced": "0"}, {"fixed": "2.0"})}, 0),
        ("2.0rc1", {"ranges": span({"introduced": "0"}, {"fixed": "2.0"})}, 1),
        ("1.10", {"ranges": span({"introduced": "1.9"}, {"last_affected": "1.10"})}, 1),
        ("1.11", {"ranges": span({"introduced": "1.9"}, {"last_affected": "1.10"})}, 0),
        ("1.2", {"ranges": span({"introduced": "1.9"})}, 0),
        ("3.1", {"ranges": span({"introduced": "0"}, {"fixed": "2"}, {"introduced": "3"}, {"fixed": "3.2"})}, 1),
        ("2.5", {"ranges": span({"introduced": "0"}, {"fixed": "2"}, {"introduced": "3"}, {"fixed": "3.2"})}, 0),
        ("1.5.0", {"versions": ["1.4", "1.5"]}, 1),
        ("1.6", {"versions": ["1.4", "1.5"]}, 0),
        ("1.6", {"ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}]}, 1),
    ],
)
def test_versions_are_compared_as_registries_do(check, version, affected, status):
    """Ranges and lists of versions decide; a build's name is no later version; what cannot be decided is reported."""
    found, lines = check([f"some-thing@{version}", "other@1"], [advisory("Some_Thing", **affected)])
    assert found == status
    assert lines[-1] == f"2 packages, 1 advisories, {status} findings"
    if status:
        may = "" if "versions" in affected or affected["ranges"][0]["type"] != "GIT" else "may be "
        assert lines[0].startswith(f"some-thing {version} {may or 'is '}affected")
        assert lines[0].endswith("PYSEC-1: a hole")


def test_what_does_not_count(check):
    """Other packages, other ecosystems and advisories that were withdrawn affect nothing; several forms are read."""
    other = advisory("thing", versions=["1"])
    other["affected"][0]["package"]["ecosystem"] = "npm"
    withdrawn = {**advisory("thing", versions=["1"]), "withdrawn": "2026-01-01T00:00:00Z"}
    lines = "\n".join(json.dumps(entry) for entry in (other, withdrawn, advisory("nothing", versions=["1"])))
    assert check(["thing@1"], lines) == (0, ["1 packages, 2 advisories, 0 findings"])


@pytest.mark.parametrize(
    "packages, content, message",
    [
        (["thing@1"], "{", "cannot be read"),
        (["thing@1"], [], "has no advisory: nothing was compared"),
        (["thing@1"], [3], "has something that is no advisory in the OSV format"),
        ([], [advisory("thing", versions=["1"])], "names no package of PyPI"),
        (["thing@one"], [advisory("thing", versions=["1"])], "Invalid version: 'one'"),
    ],
)
def test_nothing_compared_is_an_error(check, packages, content, message):
    """What cannot be read, and a comparison of nothing, are status 2."""
    status, lines = check(packages, content)
    assert status == 2
    assert message in lines[0]


def test_a_folder_of_advisories(script, tmp_path):
    """Advisories may be files in a folder; a wrong call and a file that is not an SBOM are status 2."""
    pytest.importorskip("packaging", reason="[no-tool] packaging is not installed")
    module = script("advisories")
    (tmp_path / "all" / "deep").mkdir(parents=True)
    (tmp_path / "all" / "deep" / "1.json").write_text(json.dumps(advisory("thing", versions=["1"])))
    path = sbom(tmp_path, "thing@1")
    assert module.main([str(path), str(tmp_path / "all")]) == 1
    assert module.main([str(path)]) == 2
    assert module.main([str(tmp_path / "all" / "deep" / "1.json"), str(tmp_path / "all")]) == 2
