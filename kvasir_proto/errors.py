"""Every error Kvasir raises on purpose, sorted by whose fault it is.

A `LocalProtocolError` is ours: we tried to say what the protocol does not allow. A `RemoteProtocolError` is
the sender's, and costs the sender, never this node: it always has a `code` that can be sent back. A
`KvasirError` is operational and ends a command; its class fixes the exit status, so that scripts can rely
on it (DESIGN section 7). A bug is none of these: it is an `AssertionError`. This module knows neither wire
nor command line.
"""

from __future__ import annotations

from typing import ClassVar, Final


class ProtocolError(Exception):
    """The protocol was broken. Abstract: raise one of the two subclasses, which say by whom."""

    def __init__(self, reason: str) -> None:
        if type(self) is ProtocolError:
            raise TypeError("raise LocalProtocolError or RemoteProtocolError: someone is at fault")
        super().__init__(reason)
        self.reason = reason


class LocalProtocolError(ProtocolError):
    """We asked for something the protocol does not allow: a field out of its bounds, a frame too large."""


class RemoteProtocolError(ProtocolError):
    """What somebody else sent is not acceptable.

    `code` is one stable lower-case word for programs (`malformed`, `oversize`, `bad_signature`, ...) and
    `reason` one sentence for people. The reason quotes at most a few characters of what was received.
    """

    def __init__(self, reason: str, code: str = "malformed") -> None:
        super().__init__(reason)
        self.code = code


class KvasirError(Exception):
    """An operational failure. Its message is one sentence for the user, `exit_code` the exit status."""

    exit_code: ClassVar[int] = 1

    @property
    def code(self) -> str:
        """One stable lower-case word for programs, from the class: `NoHolderLeft` is `no_holder_left`."""
        name = type(self).__name__
        return "".join("_" + each.lower() if each.isupper() else each for each in name).lstrip("_")


class EngineFailed(KvasirError):
    """The engine process died, or reported that it cannot go on."""


class ModelAborted(EngineFailed):
    """llama.cpp gave up on the model in the middle of its work, and the engine with it."""

    exit_code = 7


class TransportUnavailable(KvasirError):
    """Another node cannot be reached, or a stream to it has ended or fallen silent."""


class NotReady(KvasirError):
    """The swarm cannot serve this now, and the message says why; trying again later may help."""


class Busy(NotReady):
    """As much as can be done is being done, or waits to be."""


class NoHolderLeft(KvasirError):
    """No holder of some expert could answer within its deadline, so the step could not be finished.

    Of ``n_tokens`` tokens of a layer call these ``tokens``, counted from 0, are known to need such an expert;
    there may be more. None where nobody can say.
    """

    def __init__(self, reason: str, tokens: frozenset[int] = frozenset(), n_tokens: int = 0) -> None:
        super().__init__(reason)
        self.tokens = tokens
        self.n_tokens = n_tokens


class DiskFull(KvasirError):
    """A file of the home has no room on its disk; trying again later may help."""


class UsageError(KvasirError):
    """The command was called wrongly."""

    exit_code = 2


class NotRunning(KvasirError):
    """The command needs a running daemon, and there is none."""

    exit_code = 3


class DaemonUnreachable(KvasirError):
    """A daemon holds this home, and does not listen on its control socket."""


class AlreadyRunning(KvasirError):
    """Another daemon holds this home, or this identity is in use."""

    exit_code = 4


class PortInUse(KvasirError):
    """An address the daemon must listen on belongs to another program."""

    exit_code = 5


class ConfigurationInvalid(KvasirError):
    """A configuration file, variable or flag has an unknown key or an impossible value."""

    exit_code = 6


class ModelUnusable(KvasirError):
    """The model is missing, damaged, not a Mixture of Experts, or there is no space for it."""

    exit_code = 7


class SourceFailed(ModelUnusable):
    """One place that a model's bytes could come from does not give them; another one may."""


class NoRoomOnDisk(ModelUnusable):
    """Experts have no room on the disk: in bytes what they need, and what can be had for them."""

    def __init__(self, reason: str, need_bytes: int, have_bytes: int) -> None:
        super().__init__(reason)
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes


class IncompatibleVersion(KvasirError):
    """Two parts that must agree do not: the native library and its ggml, or two nodes' protocols."""

    exit_code = 8


class OutOfTolerance(KvasirError):
    """A measurement is outside the tolerance it was held to."""

    exit_code = 9


def error_of(code: str, reason: str) -> KvasirError:
    """What another process of ours reported, as the error that ends a command with the status of its class.

    `EngineFailed` where the class has none of its own.
    """
    return _WITH_STATUS.get(code, EngineFailed)(reason)


def error_of_session(code: str, detail: str) -> KvasirError:
    """As `error_of`, of a session that failed: the code is in the sentence, but where the call was wrong."""
    error = error_of(code, detail)
    return error if isinstance(error, UsageError) else type(error)(f"{code}: {detail}")


_WITH_STATUS: Final = {
    each("").code: each
    for each in (
        UsageError,
        ConfigurationInvalid,
        ModelUnusable,
        ModelAborted,
        IncompatibleVersion,
        OutOfTolerance,
        TransportUnavailable,
    )
}
"""Not `NotRunning`, `AlreadyRunning`, `PortInUse`: who has answered has not failed in one of these ways."""
