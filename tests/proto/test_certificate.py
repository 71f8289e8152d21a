"""An engine is bound to one node, one key and one role."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.certificate import ENGINE_BINDING, EngineBinding, bind_engine, verify_binding
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import SwarmDigest, node_id_of
from kvasir_proto.signing import open_signed, sign_message

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
NODE = node_id_of(KEY.public_key().public_bytes_raw())
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
OTHER_NODE = node_id_of(OTHER_KEY.public_key().public_bytes_raw())
SWARM = SwarmDigest(bytes(32))
ENGINE_KEY = b"DER of a key"
EXTENSION = bind_engine(KEY, SWARM, ENGINE_KEY, "worker", 3)


def _verify(**changes: Any) -> EngineBinding:
    arguments = {
        "extension": EXTENSION,
        "swarm_digest": SWARM,
        "engine_public_key": ENGINE_KEY,
        "node_id": NODE,
        "role": "worker",
    }
    return verify_binding(**(arguments | changes))


def test_binding_says_what_the_node_signed() -> None:
    binding = _verify()
    assert (binding.node_id, binding.role, binding.generation) == (NODE, "worker", 3)
    assert open_signed(EXTENSION, ENGINE_BINDING, SWARM).message == binding


@pytest.mark.parametrize(
    "changes, code",
    [
        ({"node_id": OTHER_NODE}, "wrong_node"),
        ({"engine_public_key": b"another"}, "wrong_engine"),
        ({"role": "backbone"}, "wrong_role"),
        ({"swarm_digest": SwarmDigest(bytes([1]) * 32)}, "bad_signature"),
        ({"extension": EXTENSION[:-1]}, "malformed"),
        ({"extension": b""}, "malformed"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_binding_is_good_for_nothing_else(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        _verify(**changes)
    assert caught.value.code == code


def test_one_node_cannot_bind_engines_to_another() -> None:
    honest = _verify()
    forged = sign_message(OTHER_KEY, SWARM, honest)
    for node in (NODE, OTHER_NODE):
        with pytest.raises(RemoteProtocolError) as caught:
            _verify(extension=forged, node_id=node)
        assert caught.value.code == "wrong_node"
