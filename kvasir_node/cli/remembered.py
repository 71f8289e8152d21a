"""What a home remembers of its node and its swarm while no daemon runs in it.

Read from the files alone and changing none: a person who asks why nothing runs wants to know at least whose
home this is and how far its swarm had come. What is damaged is said and does not hide the rest.
"""

from __future__ import annotations

from typing import Any

from kvasir_node.locations import Locations
from kvasir_node.net.identity import load_identity
from kvasir_node.swarm_files import SwarmFiles
from kvasir_proto.codec import decode
from kvasir_proto.election.knowledge import STORED_FENCE
from kvasir_proto.errors import ConfigurationInvalid, RemoteProtocolError
from kvasir_proto.term_proof import TERM_PROOF


def remembered(locations: Locations) -> dict[str, Any]:
    """The node, its swarm and the last term it followed, each None where this home knows none.

    `damaged` says which file could not be read; empty if all could.
    """
    document: dict[str, Any] = {
        "node_id": None,
        "swarm": None,
        "model_name": None,
        "epoch": 0,
        "term": 0,
        "backbone": None,
        "damaged": "",
    }
    files = SwarmFiles(locations.state)
    for read in (_identity, _swarm, _term):
        try:
            document |= read(locations, files)
        except (ConfigurationInvalid, RemoteProtocolError) as error:
            document["damaged"] = document["damaged"] or str(error)
    return document


def _identity(locations: Locations, _files: SwarmFiles) -> dict[str, Any]:
    identity = load_identity(locations.identity_file)
    return {} if identity is None else {"node_id": identity.node_id}


def _swarm(_locations: Locations, files: SwarmFiles) -> dict[str, Any]:
    known = files.load_swarm()
    if known is None:
        return {}
    return {"swarm": known.swarm.digest.hex(), "model_name": known.swarm.manifest.model_name}


def _term(locations: Locations, files: SwarmFiles) -> dict[str, Any]:
    files.check_undamaged()
    identity, known = load_identity(locations.identity_file), files.load_swarm()
    if identity is not None and known is not None:
        files.require_owner(known.swarm.digest, identity.node_id)
    stored = files.load_slots().get("fence")
    data = decode(stored, STORED_FENCE).proof if stored is not None else b""
    if not data:
        return {}
    proof = decode(data, TERM_PROOF)
    return {"epoch": proof.epoch, "term": proof.term, "backbone": proof.backbone}
