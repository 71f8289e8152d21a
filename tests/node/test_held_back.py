"""What a system says of a machine that slows its processors down, and of one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.held_back import is_held_back

POLICY = "devices/system/cpu/cpufreq/policy"
COOLING = "class/thermal/cooling_device"

SAID: dict[str, tuple[dict[str, str], bool | None]] = {
    "nothing": ({}, None),
    "its full clock": (
        {f"{POLICY}0/scaling_max_freq": "3000000\n", f"{POLICY}0/cpuinfo_max_freq": "3000000\n"},
        False,
    ),
    "a clock that was rounded": (
        {f"{POLICY}0/scaling_max_freq": "2990000", f"{POLICY}0/cpuinfo_max_freq": "3000000"},
        False,
    ),
    "a lower limit for one of two": (
        {
            f"{POLICY}0/scaling_max_freq": "3000000",
            f"{POLICY}0/cpuinfo_max_freq": "3000000",
            f"{POLICY}4/scaling_max_freq": "1200000",
            f"{POLICY}4/cpuinfo_max_freq": "2000000",
        },
        True,
    ),
    "half of what is needed": ({f"{POLICY}0/scaling_max_freq": "1"}, None),
    "a clock that is none": ({f"{POLICY}0/scaling_max_freq": "1", f"{POLICY}0/cpuinfo_max_freq": "0"}, None),
    "no number": ({f"{POLICY}0/scaling_max_freq": "<unsupported>", f"{POLICY}0/cpuinfo_max_freq": "3"}, None),
    "a cool processor": ({f"{COOLING}0/type": "Processor\n", f"{COOLING}0/cur_state": "0\n"}, False),
    "a hot processor": ({f"{COOLING}0/type": "Processor", f"{COOLING}0/cur_state": "3"}, True),
    "a hot phone": ({f"{COOLING}9/type": "cpufreq-cpu4", f"{COOLING}9/cur_state": "7"}, True),
    "a hot graphics chip": ({f"{COOLING}2/type": "13000000.gpu", f"{COOLING}2/cur_state": "1"}, True),
    "a power clamp at rest": ({f"{COOLING}1/type": "intel_powerclamp", f"{COOLING}1/cur_state": "-1"}, False),
    "a fan that turns": ({f"{COOLING}0/type": "Fan", f"{COOLING}0/cur_state": "1"}, None),
}


@pytest.mark.parametrize("what", SAID)
def test_a_machine_is_held_back_where_its_system_says_so(tmp_path: Path, what: str) -> None:
    files, expected = SAID[what]
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert is_held_back(tmp_path) is expected


def test_this_machine_says_something_or_nothing() -> None:
    assert is_held_back() in (True, False, None)


def test_what_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    (tmp_path / POLICY).parent.mkdir(parents=True)
    (tmp_path / f"{POLICY}0").symlink_to(tmp_path / f"{POLICY}0")
    (tmp_path / f"{COOLING}0" / "cur_state").mkdir(parents=True)
    assert is_held_back(tmp_path) is None
