"""One question and its answer on a control stream, typed; a `Refusal` becomes an exception.

Shared by both duties so that deadlines, refusals and unexpected answers mean the same everywhere.
"""

from __future__ import annotations

from typing import Final, TypeVar

from kvasir_node.ports import ControlStream
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.limits import as_sentence
from kvasir_proto.messages.swarm import SWARM, Refusal, SwarmMessage

ANSWER_TIMEOUT_S: Final = 10.0
"""For answers that need no work on the other side."""

ReplyT = TypeVar("ReplyT", bound=SwarmMessage)


async def tell(stream: ControlStream, message: SwarmMessage) -> None:
    """Send one message."""
    await stream.send(encode(message))


async def hear(stream: ControlStream, timeout_s: float = ANSWER_TIMEOUT_S) -> SwarmMessage:
    """The next message of the swarm family. Raises `RemoteProtocolError` or `TransportUnavailable`."""
    return decode(await stream.receive(timeout_s), SWARM)


async def ask(
    stream: ControlStream,
    message: SwarmMessage,
    reply_type: type[ReplyT] | tuple[type[ReplyT], ...],
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> ReplyT:
    """Send a question; its answer, of one of these types. Anything else raises `RemoteProtocolError`."""
    await tell(stream, message)
    reply = await hear(stream, timeout_s)
    if isinstance(reply, Refusal):
        raise RemoteProtocolError(reply.reason, reply.code)
    if not isinstance(reply, reply_type):
        raise RemoteProtocolError(f"{reply.kind} is no answer to {message.kind}", "unexpected_message")
    return reply


async def refuse(stream: ControlStream, error: RemoteProtocolError) -> None:
    """Say why the last message was not acceptable."""
    await tell(stream, Refusal(error.code, as_sentence(str(error))))
