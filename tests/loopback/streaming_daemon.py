"""A daemon whose `generate` goes through the gateway's port, so that a test reads tokens through any node.

Called with the arguments of `kvasir-node`. Tokens come without their text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvasir_node import app
from kvasir_node.__main__ import main
from kvasir_node.gateway.ports import TokenRequest
from kvasir_proto.messages.local import GenerateEnd, GenerateRequest, TokenEvent
from kvasir_proto.sampling import SamplingOptions


class StreamingNode(app.Node):
    """Asks whoever is the backbone, and goes on elsewhere when it dies."""

    async def generate(
        self, request: GenerateRequest, emit: Callable[[TokenEvent], Awaitable[None]]
    ) -> GenerateEnd:
        """See `Operator`."""
        options = SamplingOptions(request.sampling)
        wanted = TokenRequest("test", request.token_ids, options, request.n_tokens, (), 0)
        position = len(request.token_ids)
        async with self._running_duty().completions.open(wanted) as tokens:
            async for token in tokens:
                if token.finish == "stop":
                    return GenerateEnd("end_of_text", "", "", "{}")
                await emit(TokenEvent(position, token.token_id, b""))
                position += 1
        return GenerateEnd("length", "", "", "{}")


if __name__ == "__main__":
    setattr(app, "Node", StreamingNode)  # noqa: B010 - a type is not assigned to
    main()
