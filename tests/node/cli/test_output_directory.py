"""Where results cannot go is said before they are measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.cli import measure_report
from kvasir_node.cli.output_directory import prepare_output
from kvasir_proto.errors import UsageError
from tests.node.cli.invocation import call


def test_a_directory_is_made_and_may_hold_what_is_written_over(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    prepare_output(out, ("file",), is_new=True)
    (out / "file").write_text("old")
    prepare_output(out, ("file",))
    with pytest.raises(UsageError, match="is not empty"):
        prepare_output(out, is_new=True)


@pytest.mark.parametrize("what", ["file", "name", "device"])
def test_what_cannot_take_results_is_a_usage_error(tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    if what == "file":
        out.write_text("")
    elif what == "name":
        (out / "file").mkdir(parents=True)
    else:
        out = Path("/proc/nobody")
    with pytest.raises(UsageError, match=r"cannot take the results|is a directory"):
        prepare_output(out, ("file",))


@pytest.mark.parametrize("command", ["report", "save"])
def test_nothing_is_measured_for_results_that_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(measure_report, "_measure_operations", None)
    (tmp_path / "out").write_text("")
    outcome = call("measure", command, "--out", str(tmp_path / "out"), home=tmp_path)
    assert outcome.status == 2
    assert "cannot take the results" in outcome.err.splitlines()[-1]
