"""Devices of a machine, and variables that contradict each other."""

from __future__ import annotations

import pytest

from hyper_parallel.cli import devices, doctor, main

LINKS = {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "1"}
LISTED = {"HCCL_WHITELIST_DISABLE": "0"}
TOOLKIT = {"ASCEND_HOME_PATH": "/usr/local/Ascend/latest"}


@pytest.fixture
def nodes(tmp_path):
    """A folder with the nodes of two NPUs, three GPUs and what stands beside them."""
    for name in ("davinci0", "davinci1", "davinci_manager", "nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    return tmp_path


def test_devices_are_counted_by_their_nodes(nodes, tmp_path):
    """Each numbered node is a device; without nodes, or without the folder, there is none and nothing to describe."""
    assert (devices.present("npu", nodes), devices.present("cuda", nodes)) == ([0, 1], [0, 1, 2])
    assert devices.present("npu", tmp_path / "none") == []
    assert devices.described("npu", {}, tmp_path / "none") == ""


@pytest.mark.parametrize(
    "device, variables, found",
    [
        ("npu", {}, []),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "1,0", "HCCL_INTRA_ROCE_ENABLE": "1"}, []),
        ("cuda", LINKS | LISTED | {"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ("npu", LINKS, [(
            "HCCL_INTRA_PCIE_ENABLE=1 and HCCL_INTRA_ROCE_ENABLE=1: HCCL takes one of them",
            "unset HCCL_INTRA_PCIE_ENABLE or HCCL_INTRA_ROCE_ENABLE",
        )]),
        ("npu", LISTED, [(
            "HCCL_WHITELIST_DISABLE=0 asks for a list of addresses, and HCCL_WHITELIST_FILE names none",
            "set HCCL_WHITELIST_FILE to the list, or HCCL_WHITELIST_DISABLE=1",
        )]),
        ("npu", LISTED | {"HCCL_WHITELIST_FILE": "/list"}, []),
        ("npu", {"RANK_TABLE_FILE": __file__, "CM_CHIEF_IP": "10.0.0.1"}, [(
            f"RANK_TABLE_FILE={__file__} and CM_CHIEF_IP=10.0.0.1: HCCL takes the cluster from one",
            "unset RANK_TABLE_FILE or CM_CHIEF_IP",
        )]),
        ("npu", {"RANK_TABLE_FILE": __file__, "HCCL_CONNECT_TIMEOUT": "7200", "HCCL_IF_BASE_PORT": "64000"}, []),
        ("npu", {"RANK_TABLE_FILE": "/no/table.json", "HCCL_CONNECT_TIMEOUT": "60", "HCCL_IF_BASE_PORT": "x"}, [
            ("RANK_TABLE_FILE=/no/table.json: there is no such file", "unset RANK_TABLE_FILE, or name the file"),
            (
                "HCCL_CONNECT_TIMEOUT=60: HCCL takes whole numbers from 120 to 7200",
                "unset HCCL_CONNECT_TIMEOUT, which makes it 120",
            ),
            (
                "HCCL_IF_BASE_PORT=x: HCCL takes whole numbers from 0 to 65520",
                "unset HCCL_IF_BASE_PORT, which makes it 60000",
            ),
        ]),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "0,7"}, [(
            "ASCEND_RT_VISIBLE_DEVICES=0,7: there is no device 7; there are 0,1",
            "export ASCEND_RT_VISIBLE_DEVICES=0,1",
        )]),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "2,2"}, [
            ("CUDA_VISIBLE_DEVICES=2,2 names a device twice", "export CUDA_VISIBLE_DEVICES=2")
        ]),
    ],
)  # fmt: skip
def test_contradictions_say_what_was_found_and_what_to_set(device, variables, found, nodes):
    """Each documented contradiction is one text with one fix; variables that agree are none."""
    assert devices.contradictions(device, TOOLKIT | variables, nodes) == found


def test_a_driver_without_toolkit_is_told(nodes, tmp_path):
    """Devices of Ascend need the toolkit's variables; a machine without such devices does not."""
    found = [(
        "there is a driver and no toolkit: neither ASCEND_HOME_PATH nor ASCEND_TOOLKIT_HOME is set",
        "source the set_env.sh of the CANN toolkit",
    )]  # fmt: skip
    assert devices.contradictions("npu", {}, nodes) == found
    assert devices.contradictions("npu", {"ASCEND_TOOLKIT_HOME": "/here"}, nodes) == []
    assert devices.contradictions("npu", {}, tmp_path / "none") == []


@pytest.mark.parametrize("kind", ["model", "program train.py", "ops", "redistribute"])
@pytest.mark.platforms("torch")
def test_contradictions_are_bad_input_of_a_run_on_a_device(kind, monkeypatch, capsys):
    """Exit status 2 and one line, before a framework is asked for its devices; a run on CPU does not mind."""
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    assert main(["verify", *kind.split(), "--platform", "torch", "--device", "npu"]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: --device npu: HCCL_INTRA_PCIE_ENABLE=1 and HCCL_INTRA_ROCE_ENABLE=1: HCCL takes one of "
        "them; unset HCCL_INTRA_PCIE_ENABLE or HCCL_INTRA_ROCE_ENABLE\n"
    )


def test_doctor_shows_devices_and_contradictions(nodes, monkeypatch):
    """The number of devices with what is known of them, and each contradiction as wrong, with its fix."""
    monkeypatch.setattr(devices, "_nvidia", lambda: "3 x Model, 80 GiB, 1.2")
    found = {finding.what: finding for finding in doctor.device_findings(TOOLKIT | LINKS, nodes)}
    assert (found["cuda devices"].state, found["cuda devices"].text) == ("ok", "3 devices: 3 x Model, 80 GiB, 1.2")
    assert found["npu devices"].text == "2 devices: driver unknown, toolkit /usr/local/Ascend/latest"
    assert (found["npu settings"].state, found["npu settings"].fix) == (
        "wrong", "unset HCCL_INTRA_PCIE_ENABLE or HCCL_INTRA_ROCE_ENABLE",
    )  # fmt: skip
    assert devices.described("npu", {}, nodes) == "2 devices: driver unknown, toolkit not set up"
    assert doctor.device_findings({}, nodes / "none") == []


def test_names_come_from_the_drivers_tool(monkeypatch, tmp_path):
    """Equal devices are counted; a tool that is absent or fails is said, and nothing is guessed."""
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia0").touch()
    assert devices.described("cuda", {}, tmp_path) == (
        "1 device: nvidia-smi is not on the path, so names, memory and driver are unknown"
    )
    tool.write_text("#!/bin/sh\necho 'A, 80 MiB, 5'\necho 'A, 80 MiB, 5'\n")
    tool.chmod(0o755)
    assert devices.described("cuda", {}, tmp_path) == "1 device: 2 x A, 80 MiB, 5"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert devices.described("cuda", {}, tmp_path) == "1 device: nvidia-smi does not answer (CalledProcessError)"
