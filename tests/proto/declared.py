"""A second reading of what messages declare, apart from the codec's: to draw values and to make examples.

`values_of` gives a Hypothesis strategy for all legal values of a message, `example_of` one fixed value that
changes only when a declaration does. Long sequences are drawn short: their bounds have tests of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from kvasir_proto.accusation import ACCUSATION
from kvasir_proto.admission import ADMISSION_KEPT, CREDENTIAL, INVITE, REDEMPTION, REVOCATION
from kvasir_proto.audit.evidence import ROW_EVIDENCE
from kvasir_proto.capability import CAPABILITY
from kvasir_proto.certificate import ENGINE_BINDING
from kvasir_proto.election.configuration import LINK, NOMINATION, PROPOSAL, RECOVERY
from kvasir_proto.election.elector import STORED_PROMISES
from kvasir_proto.election.knowledge import STORED_ELECTORATES, STORED_FENCE
from kvasir_proto.election.readiness import PRE_VOTE
from kvasir_proto.election.release import RELEASE
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.limits import Length, Range
from kvasir_proto.measured_kernel import KEPT_MEASUREMENT
from kvasir_proto.messages import Family
from kvasir_proto.messages.admission import ADMISSION
from kvasir_proto.messages.certification import CERTIFICATION
from kvasir_proto.messages.election import ELECTION
from kvasir_proto.messages.engine import ENGINE
from kvasir_proto.messages.experts import EXPERT_EXCHANGE
from kvasir_proto.messages.local import LOCAL
from kvasir_proto.messages.membership import MEMBERSHIP, RESERVED_INCARNATIONS
from kvasir_proto.messages.plan import PLAN_EXCHANGE
from kvasir_proto.messages.records import RECORDS
from kvasir_proto.messages.session import SESSION
from kvasir_proto.messages.swarm import SWARM
from kvasir_proto.placement.plan import PLAN
from kvasir_proto.records import RECORDS_KEPT
from kvasir_proto.signing import SIGNED
from kvasir_proto.swarm_manifest import SWARM_MANIFEST
from kvasir_proto.term_proof import ENDORSEMENT, TERM_PROOF, VOTE
from kvasir_proto.tolerance_certificate import AUDITOR_VERDICT, TOLERANCE_CERTIFICATE
from kvasir_proto.verdicts_in_force import VERDICTS_KEPT

FAMILIES: tuple[Family[Any], ...] = (
    SWARM,
    SESSION,
    ENGINE,
    LOCAL,
    SIGNED,
    ENGINE_BINDING,
    SWARM_MANIFEST,
    CAPABILITY,
    KEPT_MEASUREMENT,
    TOLERANCE_CERTIFICATE,
    AUDITOR_VERDICT,
    CERTIFICATION,
    VOTE,
    ENDORSEMENT,
    TERM_PROOF,
    PLAN,
    PLAN_EXCHANGE,
    EXPERT_EXCHANGE,
    MEMBERSHIP,
    RESERVED_INCARNATIONS,
    RECORDS,
    RECORDS_KEPT,
    VERDICTS_KEPT,
    ROW_EVIDENCE,
    ACCUSATION,
    ADMISSION,
    INVITE,
    REDEMPTION,
    CREDENTIAL,
    REVOCATION,
    ADMISSION_KEPT,
    ELECTION,
    PRE_VOTE,
    RELEASE,
    NOMINATION,
    PROPOSAL,
    RECOVERY,
    LINK,
    STORED_PROMISES,
    STORED_ELECTORATES,
    STORED_FENCE,
)
MEMBERS = tuple((family, member) for family in FAMILIES for member in family.members)
MEMBER_IDS = tuple(f"{family.name.replace(' ', '_')}-{member.kind}" for family, member in MEMBERS)

_DRAWN_LENGTH_MAX = 12


def _parts(annotation: Any) -> tuple[Any, Any]:
    """The type proper and its bound, if it has one."""
    bound = None
    if get_origin(annotation) is Annotated:
        annotation, *constraints = get_args(annotation)
        bound = next((each for each in constraints if isinstance(each, Range | Length)), None)
    return annotation, bound


def _fields(message_type: type[Any]) -> list[tuple[str, Any]]:
    hints = get_type_hints(message_type, include_extras=True)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(message_type)]


def values_of(message_type: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(message_type, *(_values(annotation) for _, annotation in _fields(message_type)))


@cache
def _values(annotation: Any) -> st.SearchStrategy[Any]:
    plain, bound = _parts(annotation)
    if plain is NodeId:
        return st.binary(min_size=32, max_size=32).map(node_id_of)
    plain = getattr(plain, "__supertype__", plain)
    if plain is bool:
        return st.booleans()
    if plain is int:
        return st.integers(bound.low, bound.high)
    if plain is float:
        return st.floats(bound.low, bound.high)
    if get_origin(plain) is Literal:
        return st.sampled_from(get_args(plain))
    if dataclasses.is_dataclass(plain):
        return values_of(plain)  # type: ignore[arg-type]  # a class: instances are no annotations
    if get_origin(plain) is tuple and bound is None:
        return st.tuples(*map(_values, get_args(plain)))
    if get_origin(plain) is tuple:
        return st.lists(
            _values(get_args(plain)[0]), min_size=bound.low, max_size=_drawn_length_max(bound)
        ).map(tuple)
    if plain is str:
        return st.text(
            st.characters(exclude_categories=["Cs"]), min_size=bound.low, max_size=_drawn_length_max(bound)
        )
    if plain is bytes:
        return st.binary(min_size=bound.low, max_size=_drawn_length_max(bound))
    (inner, none) = get_args(plain)
    assert none is type(None)
    return st.none() | _values(inner)


def _drawn_length_max(bound: Length) -> int:
    return max(bound.low, min(bound.high, _DRAWN_LENGTH_MAX))


def example_of(message_type: type[Any], place: str = "") -> Any:
    """One value, made from the names of its fields alone."""
    place = place or message_type.__name__
    return message_type(
        *(_example(annotation, f"{place}.{name}") for name, annotation in _fields(message_type))
    )


def _example(annotation: Any, place: str) -> Any:
    plain, bound = _parts(annotation)
    noise = hashlib.sha256(place.encode()).digest()
    number = int.from_bytes(noise[:8], "big")
    if plain is NodeId:
        return node_id_of(noise)
    plain = getattr(plain, "__supertype__", plain)
    if plain is bool:
        return bool(number & 1)
    if plain is int:
        return bound.low + number % (bound.high - bound.low + 1)
    if plain is float:
        return bound.low + (bound.high - bound.low) * (number / 2**64)
    if get_origin(plain) is Literal:
        return get_args(plain)[number % len(get_args(plain))]
    if dataclasses.is_dataclass(plain):
        return example_of(plain, place)  # type: ignore[arg-type]  # as above
    if get_origin(plain) is tuple and bound is None:
        return tuple(_example(each, f"{place}[{i}]") for i, each in enumerate(get_args(plain)))
    if get_origin(plain) is tuple:
        return tuple(_example(get_args(plain)[0], f"{place}[{i}]") for i in range(max(2, bound.low)))
    if plain is str:
        return f"{place} \N{LATIN SMALL LETTER ETH}"[-bound.high :]
    if plain is bytes:
        return noise.ljust(bound.low, b"\x00")[: min(bound.high, max(bound.low, 32))]
    return _example(get_args(plain)[0], place)
