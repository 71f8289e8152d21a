"""A decode that waits for holders: what is evaluated alone is not given up because an expert's last one died.

Apart from sessions, which are many in a ubatch and are set aside one by one. It knows nothing of where
experts are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvasir_node.backbone.trunk import Trunk
from kvasir_proto.errors import NoHolderLeft

DECODES_MAX: Final = 4
"""How often one ubatch is decoded: holders that come and die again may not keep an evaluation for ever."""


def decode_patiently(
    trunk: Trunk, tokens: Sequence[int], await_holders: Callable[[], bool], **options: bool
) -> None:
    """Decode one ubatch as `Trunk.decode` does, and again where the last holder of an expert died under it.

    ``await_holders`` says whether every expert has one again; what it raises passes through. Whoever reads
    the result sees no difference: the same ubatch at the same position. Raises what a decode raises.
    """
    position = trunk.position
    for attempt in range(DECODES_MAX):
        try:
            trunk.decode(tokens, **options)
            return
        except NoHolderLeft:
            # A trunk whose states were half changed has forgotten its sequence.
            if trunk.position != position or attempt + 1 == DECODES_MAX or not await_holders():
                raise
