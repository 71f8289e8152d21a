"""Messages, one module a family: what can be said on one kind of connection, and by which name.

A message is a frozen dataclass whose fields declare their bounds; its `kind` is its name on the wire. A
family is the set of messages one connection carries, so that a node can never send what only a local command
may say. Messages know nothing of bytes: that is the codec's part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Generic, Protocol, TypeVar


class Message(Protocol):
    """A frozen dataclass with bounded fields and a name on the wire."""

    kind: ClassVar[str]


MessageT = TypeVar("MessageT", bound=Message)


class Family(Generic[MessageT]):
    """The messages that one kind of connection carries.

    `size_bytes_max` bounds one encoded message; it is also the frame limit of such a connection.
    """

    def __init__(self, name: str, members: Iterable[type[MessageT]], size_bytes_max: int) -> None:
        self.name = name
        self.size_bytes_max = size_bytes_max
        self.members = tuple(members)
        self.by_kind: dict[str, type[MessageT]] = {member.kind: member for member in self.members}
        if len(self.by_kind) != len(self.members):
            raise ValueError(f"two messages of the {name} family have one kind")
