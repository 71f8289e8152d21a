"""What a node persisted in its slots, read as far as the cores look into it, and refused by the slot's name.

Whoever starts a node reads every slot first, before anything of it is heard: damage must be named where a
person can see it, and a core that finds it later has no way to go on. Only what cannot be read is refused
here; whose a signature is, and what it is worth, the cores judge. It knows no files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvasir_proto.admission import ADMISSION_KEPT
from kvasir_proto.codec import decode
from kvasir_proto.effects import Slot
from kvasir_proto.election.elector import read_promises
from kvasir_proto.election.knowledge import read_electorates, read_fence
from kvasir_proto.messages import Family
from kvasir_proto.messages.membership import RESERVED_INCARNATIONS
from kvasir_proto.placement.plan import PLAN
from kvasir_proto.records import RECORDS_KEPT
from kvasir_proto.verdicts_in_force import VERDICTS_KEPT


def _of(family: Family[Any]) -> Callable[[bytes], object]:
    return lambda data: decode(data, family)


_READ: Final[dict[Slot, Callable[[bytes], object]]] = {
    "admission": _of(ADMISSION_KEPT),
    "election": read_promises,
    "electorate": read_electorates,
    "fence": read_fence,
    "incarnation": _of(RESERVED_INCARNATIONS),
    "plan": _of(PLAN),
    "records": _of(RECORDS_KEPT),
    "verdicts": _of(VERDICTS_KEPT),
}


def check_readable(slot: Slot, data: bytes) -> None:
    """Raise `RemoteProtocolError` for bytes that no core has persisted in this slot."""
    _READ[slot](data)
