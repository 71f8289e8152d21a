"""Whom we were with last time: a file of members and their addresses, one source of discovery among several.

It is a hint and nothing more: what is in it was once true, so a damaged or missing file costs a log line. It
is bounded, whole or not there, and keeps those seen most recently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog
import trio

from kvasir_node.durable_file import durable_file
from kvasir_node.net.dialler import address_of
from kvasir_node.small_file import read_small_file
from kvasir_proto.ids import NodeId, is_node_id

MEMBERS_MAX: Final = 256
ADDRESSES_MAX: Final = 8
_FILE_SIZE_MAX: Final = 2 << 20
_SCHEMA_VERSION: Final = 1

log = structlog.get_logger(__name__)


class MembersFile:
    """`members.json` of a home. Loading never fails; saving says in the log that it did."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[NodeId, tuple[str, ...]]:
        """The members of last time, those seen last first."""
        try:
            document = json.loads(read_small_file(self._path, _FILE_SIZE_MAX))
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.warning("members_file_unreadable", path=str(self._path), reason=error.strerror or str(error))
            return {}
        except (ValueError, RecursionError):
            reason = "it is not JSON: remove it, it will be written again"
            log.warning("members_file_damaged", path=str(self._path), reason=reason)
            return {}
        members: dict[NodeId, tuple[str, ...]] = {}
        entries = document.get("members") if isinstance(document, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            node_id = entry.get("node_id") if isinstance(entry, dict) else None
            if not isinstance(node_id, str) or not is_node_id(node_id) or len(members) == MEMBERS_MAX:
                continue
            named = entry.get("addresses")
            texts = [each for each in named if isinstance(each, str)] if isinstance(named, list) else []
            kept = tuple(each for each in texts if address_of(NodeId(node_id), each))[:ADDRESSES_MAX]
            if kept:
                members[NodeId(node_id)] = kept
        return members

    async def save(self, members: Mapping[NodeId, tuple[str, ...]]) -> None:
        """Replace what is there; of too many the first are kept. Writes in a thread: a disk may be slow."""
        kept = list(members.items())[:MEMBERS_MAX]
        document = {
            "schema_version": _SCHEMA_VERSION,
            "members": [
                {"node_id": node_id, "addresses": list(addresses[:ADDRESSES_MAX])}
                for node_id, addresses in kept
            ],
        }
        data = json.dumps(document, indent=1).encode()
        try:
            await trio.to_thread.run_sync(self._write, data)
        except OSError as error:
            log.warning("members_file_unwritable", path=str(self._path), reason=error.strerror or str(error))

    def _write(self, data: bytes) -> None:
        with durable_file(self._path) as file:
            file.write(data)
