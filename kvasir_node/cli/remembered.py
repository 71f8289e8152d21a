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
from kvasir_proto.errors import ConfigurationInvalid
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
    try:
        identity = load_identity(locations.identity_file)
        document["node_id"] = identity.node_id if identity is not None else None
        known = files.load_swarm()
        if known is not None:
            document["swarm"] = known.swarm.digest.hex()
            document["model_name"] = known.swarm.manifest.model_name
        stored = files.load_slots().get("fence")
        data = decode(stored, STORED_FENCE).proof if stored is not None else b""
        if data:
            proof = decode(data, TERM_PROOF)
            document |= {"epoch": proof.epoch, "term": proof.term, "backbone": proof.backbone}
    except ConfigurationInvalid as error:
        document["damaged"] = str(error)
    return document
