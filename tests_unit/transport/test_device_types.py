"""What can be determined of MindSpore's build without importing it."""

from __future__ import annotations

from hyper_parallel.transport.device_types import dry_run, has_plugin


def test_the_build_for_ascend_is_known_by_its_plugin(tmp_path):
    """The CPU build of MindSpore has no plugin for Ascend, whatever other plugins there are."""
    plugins = tmp_path / "lib" / "plugin"
    plugins.mkdir(parents=True)
    (plugins / "libmindspore_ops_cpu.so").touch()
    assert not has_plugin(tmp_path)
    (plugins / "libmindspore_ascend.so.2").touch()
    assert has_plugin(tmp_path)


def test_a_dry_run_is_told_with_what_to_unset():
    """MindSpore's simulation level would give results that nobody computed."""
    assert dry_run({}) is None
    assert dry_run({"MS_SIMULATION_LEVEL": "1"}) == (
        "MS_SIMULATION_LEVEL=1: MindSpore makes a dry run, without values and without HCCL",
        "unset MS_SIMULATION_LEVEL",
    )
