"""How many processors a process may use, from files as both versions of control groups write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.engine.processor_limit import processors_allowed


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "groups, files, expected",
    [
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/cpu.max": "20000 100000", "a/b/cpu.max": "max 100000"}, 0.2),
        ("0::/a\n", {"a/cpu.max": "300000 100000"}, 3.0),
        (
            "4:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "1000", "cpu,cpuacct/a/cpu.cfs_period_us": "10000"},
            0.1,
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:memory:/a\n", {"a/cpu.max": "10000 100000"}, None),
        ("0::/../../other\n", {"other/cpu.max": "10000 100000"}, 0.1),
        ("0::/\n", {"cpu.max": "many\n"}, None),
        ("0::/\n", {"cpu.max": "10000 0\n"}, None),
        ("nonsense\n", {}, None),
        ("", {}, None),
    ],
)
def test_the_tightest_limit_counts(
    tmp_path: Path, groups: str, files: dict[str, str], expected: float | None
) -> None:
    write(tmp_path / "groups", groups)
    for name, text in files.items():
        write(tmp_path / "mount" / name, text)
    assert processors_allowed(tmp_path / "groups", tmp_path / "mount") == expected


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert processors_allowed(tmp_path / "nothing", tmp_path) is None
    write(tmp_path / "groups", "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"))
    assert processors_allowed(tmp_path / "groups", tmp_path) is None
