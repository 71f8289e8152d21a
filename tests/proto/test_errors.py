"""Errors carry what their reader needs: an exit status for scripts, a code for programs."""

from __future__ import annotations

import pytest

from kvasir_proto.errors import (
    EngineFailed,
    KvasirError,
    LocalProtocolError,
    NoHolderLeft,
    ProtocolError,
    RemoteProtocolError,
    error_of,
    error_of_session,
)

EXIT_CODES = {
    "UsageError": 2,
    "NotRunning": 3,
    "AlreadyRunning": 4,
    "PortInUse": 5,
    "ConfigurationInvalid": 6,
    "ModelAborted": 7,
    "ModelUnusable": 7,
    "IncompatibleVersion": 8,
    "OutOfTolerance": 9,
}

KINDS = [
    each
    for each in (*KvasirError.__subclasses__(), *EngineFailed.__subclasses__())
    if each.__module__ == KvasirError.__module__
]
"""Those that one process reports to another, whatever module with errors of its own was imported before."""


def test_exit_codes_are_the_documented_ones() -> None:
    """Whatever is not named in DESIGN section 7 is plain failure."""
    kinds = [*KvasirError.__subclasses__(), *EngineFailed.__subclasses__()]
    found = {each.__name__: each.exit_code for each in kinds if each.exit_code != 1}
    assert found == EXIT_CODES
    assert KvasirError.exit_code == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_process_reports_ends_a_command_with_the_status_of_its_class(
    kind: type[KvasirError],
) -> None:
    """But for what an answer cannot mean: that no daemon runs, that another has the home or the port."""
    code = kind("").code
    expected = kind.exit_code if kind.exit_code not in (3, 4, 5) else 1
    assert error_of(code, "why").exit_code == error_of_session(code, "why").exit_code == expected
    assert str(error_of(code, "why")) == "why"
    assert str(error_of_session(code, "why")) == ("why" if code == "usage_error" else f"{code}: why")


def test_what_is_of_no_class_is_plain_failure() -> None:
    assert type(error_of("busy", "why")) is EngineFailed
    assert str(error_of_session("busy", "why")) == "busy: why"


def test_operational_errors_have_a_code_made_from_their_name() -> None:
    assert NoHolderLeft("expert 3").code == "no_holder_left"


def test_somebody_is_at_fault() -> None:
    with pytest.raises(TypeError, match="at fault"):
        ProtocolError("something happened")


def test_protocol_errors_keep_their_words() -> None:
    local, remote = LocalProtocolError("too long"), RemoteProtocolError("too long", "oversize")
    assert (local.reason, str(local)) == ("too long", "too long")
    assert (remote.reason, remote.code, str(remote)) == ("too long", "oversize", "too long")
    assert RemoteProtocolError("what?").code == "malformed"


def test_protocol_errors_are_not_operational_errors() -> None:
    assert not issubclass(ProtocolError, KvasirError)
