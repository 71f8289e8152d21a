"""An elector recomputes the rows that evidence shows, and says what follows from them for who gave them.

Whose rows they are was checked before (`kvasir_proto.audit.evidence`); here they are only judged, by the same
referee as in an audit, in the arithmetic that the accused claims. Who asked may have chosen what to ask: a
row that an honest kernel's own sums could lose, because nearly everything in it cancels, is evidence of
nothing, and so is one that the model itself cannot compute, or of an expert that is not here. It refuses to
know who accuses whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvasir_node.certification.claimed_arithmetic import Claim
from kvasir_node.certification.row_referee import RowReferee
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.manifest_file import read_manifest
from kvasir_node.native_library import load
from kvasir_proto.audit.evidence import ROW_EVIDENCE, ROWS_NEEDED, ShownRow, rows_shown
from kvasir_proto.audit.finding import Finding
from kvasir_proto.audit.verdict import is_wrong_for_short_sums, word_of
from kvasir_proto.codec import decode
from kvasir_proto.dispatch import Q8_0_BLOCK, Q8_0_BLOCK_BYTES, WireType
from kvasir_proto.errors import ModelUnusable, ProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.manifest import ModelManifest
from kvasir_proto.messages.engine import RecomputeRows, RowsRecomputed

Float32Array = npt.NDArray[np.float32]
Read = Callable[[str, int], bytes | bytearray | memoryview]

SENSITIVE_GATE_SHARE: Final = 0.25
"""Of the gate: a row that the last bit of what was asked moves by more than this proves nothing."""
UNSTEADY_TIMES: Final = 4.0
"""A row counts where it is off by more than so many times what disturbed sums move it: of whoever chose it,
and the program too, it may have been chosen to have values on the edge of being rounded the other way."""


class Opinion(NamedTuple):
    """What rows make of a node: a verdict, that they are right, or nothing."""

    outcome: Literal["unfit", "quarantined", "right", "inconclusive"]
    reason: str
    n_rows: int
    """Rows that nothing explains."""


def recompute(message: RecomputeRows) -> RowsRecomputed:
    """What the rows of this evidence are. Raises as files do."""
    manifest = read_manifest(Path(message.manifest_path))
    claim = Claim(message.adds_in_f32, message.activation)
    evidence = decode(message.evidence, ROW_EVIDENCE)
    with ExpertSource(Path(message.source_path), manifest) as source:
        programs = frozenset(message.programs)
        opinion = judge(evidence.node_id, rows_shown(evidence), claim, manifest, source.read, programs)
    return RowsRecomputed(message.request, opinion.outcome, opinion.reason, opinion.n_rows)


def judge(
    node_id: NodeId,
    shown: Sequence[ShownRow],
    claim: Claim,
    manifest: ModelManifest,
    read: Read,
    programs: frozenset[bytes] = frozenset(),
) -> Opinion:
    """What these rows make of a node that claims that. `programs` are the digests of those that the model
    asks for; empty where nobody here knows them.
    """
    referee = RowReferee(manifest, read)
    try:
        found = [
            _finding(referee, node_id, row, claim) if _is_of(manifest, programs, row) else None
            for row in shown
        ]
    finally:
        referee.close()
    wrong = [each for each in found if each is not None and _is_wrong(each, claim)]
    n_void = sum(each is None or each.outcome == "void" for each in found)
    n_all = len(found)
    if len(wrong) >= ROWS_NEEDED:
        word = word_of(wrong) if claim.can_be_held_to else "quarantined"
        reason = f"{len(wrong)} of {n_all} rows that it gave differ by what explains nothing"
        return Opinion(word, reason, len(wrong))
    if len(wrong) + n_void >= ROWS_NEEDED:
        return Opinion("inconclusive", f"{n_void} of {n_all} rows cannot be judged", len(wrong))
    return Opinion("right", f"{n_all - len(wrong) - n_void} of {n_all} rows are right", len(wrong))


def _is_of(manifest: ModelManifest, programs: frozenset[bytes], row: ShownRow) -> bool:
    """Whether the model has that expert, and asks for that of it."""
    is_there = row.layer in manifest.moe_layers and row.expert < manifest.n_expert
    return is_there and (not programs or row.program.digest() in programs)


def _is_wrong(finding: Finding, claim: Claim) -> bool:
    return finding.outcome == "foreign" if claim.can_be_held_to else is_wrong_for_short_sums(finding)


def _finding(referee: RowReferee, node_id: NodeId, row: ShownRow, claim: Claim) -> Finding | None:
    """What a row is; None where nobody can be held to it."""
    x, answer = _values(row), np.frombuffer(row.answer, np.float32)
    try:
        (finding,) = referee.judge(
            node_id, row.layer, row.program, row.expert, x[None], answer[None], claim.form
        )
        if finding.outcome == "foreign":
            moved = referee.sensitivity(row.layer, row.program, row.expert, x)
            if not moved <= SENSITIVE_GATE_SHARE * finding.gate:
                return None
            off = referee.unsteadiness(row.layer, row.program, row.expert, x, claim.form)
            if not finding.residual > UNSTEADY_TIMES * off:
                return None
    except (ProtocolError, ValueError, KeyError):
        return None  # of other shapes than the model's
    except ModelUnusable:
        return None  # of an expert that this home has not fetched, or whose bytes are damaged here
    return finding


def _values(row: ShownRow) -> Float32Array:
    if row.wire_type is WireType.F32:
        return np.frombuffer(row.x, np.float32)
    x = np.empty(len(row.x) // Q8_0_BLOCK_BYTES * Q8_0_BLOCK, np.float32)
    blocks = np.frombuffer(row.x, np.uint8)
    load().expand_q8_0(blocks.ctypes.data, x.size, x.ctypes.data)
    return x
