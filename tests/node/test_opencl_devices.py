"""OpenCL devices: which one is meant, and that drivers which misbehave are an error and not the end."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir_node.kernels import opencl_devices
from kvasir_node.kernels.opencl_devices import OpenClDevice, choose_device, devices_seen_by_child
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import ConfigurationInvalid
from kvasir_proto.messages.engine import ENGINE, LoadShard
from tests.node.opencl_here import opencl_devices as devices_here

CPU = OpenClDevice(0, "pthread-some processor", "PoCL", "3.1", "cpu", 1 << 34, False)
CARD = OpenClDevice(1, "Some Card 3090", "A driver", "1", "gpu", 1 << 34, True)
TWIN = replace(CARD, number=2)
OTHER = OpenClDevice(3, "Some Card", "A driver", "1", "gpu", 1 << 34, True)
ALL = (CPU, CARD, TWIN, OTHER)


@pytest.mark.parametrize(
    "wanted, devices, chosen",
    [
        ("auto", ALL, CARD),
        ("auto", (CPU,), CPU),
        ("0", ALL, CPU),
        ("2", ALL, TWIN),
        ("processor", ALL, CPU),
        ("3090", ALL, CARD),  # no number of the list has so many digits
        ("some card", ALL, OTHER),  # a whole name before a part of others
        ("SOME CARD 3090", ALL, CARD),
    ],
)
def test_a_device_is_chosen(wanted: str, devices: tuple[OpenClDevice, ...], chosen: OpenClDevice) -> None:
    assert choose_device(wanted, devices) == chosen


@pytest.mark.parametrize(
    "wanted, devices, sentence",
    [
        ("auto", (), "there is no OpenCL device here"),
        ("0", (), "there is no OpenCL device here"),
        ("7", ALL, "'7' is not here: there are 0 'pthread-some processor', 1 'Some Card 3090'"),
        ("radeon", ALL, "'radeon' is not here"),
        ("some", ALL, "'some' is not one device"),
    ],
)
def test_a_device_that_is_not_there_is_named_beside_those_that_are(
    wanted: str, devices: tuple[OpenClDevice, ...], sentence: str
) -> None:
    with pytest.raises(ConfigurationInvalid, match=sentence) as raised:
        choose_device(wanted, devices)
    assert raised.value.exit_code == 6


def test_a_name_has_room_in_a_record_and_writes_on_no_terminal() -> None:
    name = replace(CPU, name="a\x1b[31m" + "b" * 100).word
    assert len(name) == 64
    assert name.isprintable()
    assert replace(CPU, name="").word == "unnamed"


def test_the_longest_name_that_can_be_configured_fits_the_message() -> None:
    message = LoadShard(1, "m", "s", b"x", 1, "opencl", "\N{GREEK SMALL LETTER ALPHA}" * 64)
    assert decode(encode(message), ENGINE) == message


def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let this script be what asks the drivers."""
    file = tmp_path / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))


@pytest.mark.parametrize(
    "script, sentence",
    [
        ("kill -SEGV $$", r"ended the process that asked for its devices \(status -11\)"),
        ("exit 3", r"\(status 3\)"),
        ("sleep 30", "do not say in 0.2 s"),
        ("""echo '{"error": "no such thing"}'""", "no such thing"),
    ],
)
def test_drivers_that_crash_or_hang_are_an_error(
    script: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(tmp_path, monkeypatch, f"exec {script}" if script.startswith("sleep") else script)
    monkeypatch.setattr(opencl_devices, "CHILD_TIMEOUT_S", 0.2 if script.startswith("sleep") else 60.0)
    with pytest.raises(ConfigurationInvalid, match=sentence):
        devices_seen_by_child()


def test_asking_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "POCL_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    try:
        devices_seen_by_child()
    except ConfigurationInvalid as error:
        assert "PyOpenCL" in str(error)  # noqa: PT017 - where it is not installed that is the answer
    assert [*tmp_path.iterdir()] == []


def test_a_child_sees_what_this_process_sees() -> None:
    found, reason = devices_here()
    if not found:
        pytest.skip(reason)
    assert found == opencl_devices.list_devices()
    assert [each.number for each in found] == list(range(len(found)))
