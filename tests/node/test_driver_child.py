"""A child that asks drivers: what they print themselves is no part of the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.driver_child import devices_told_by
from kvasir_proto.errors import ConfigurationInvalid

TALKATIVE = """
import os
import sys

from kvasir_node.driver_child import tell_devices
from kvasir_node.telemetry import get_logger


def answer():
    print("ggml_vulkan: Found 1 Vulkan devices:")
    sys.stdout.flush()
    os.write(1, b"a driver's own printf")
    get_logger().debug("llama_cpp_said", text="and a log that nobody set up")
    return {"devices": [{"name": "Vulkan0"}]}


tell_devices(answer)
"""


def told_by(directory: Path, code: str) -> list[dict[str, object]]:
    (directory / "talkative.py").write_text(code)
    return devices_told_by("talkative", "GPU", 60.0, {"PYTHONPATH": str(directory)})


def test_what_drivers_print_is_no_part_of_the_answer(tmp_path: Path) -> None:
    assert told_by(tmp_path, TALKATIVE) == [{"name": "Vulkan0"}]


@pytest.mark.parametrize(
    "code, said",
    [
        ("import os; os.abort()", r"one of the GPU drivers ended the process .* \(status -6\)"),
        ("", r"ended the process .* \(status 0\)"),
        (TALKATIVE.replace('"devices": [{"name": "Vulkan0"}]', '"error": "none here"'), "^none here$"),
    ],
)
def test_a_child_without_an_answer_is_an_error(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(ConfigurationInvalid, match=said):
        told_by(tmp_path, code)
