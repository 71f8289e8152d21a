"""`kvasir-node generate` on a node that is not the backbone: its session runs wherever the gateway's do.

Apart from the backbone's duty, which answers such a request itself with counters that only its engine has
and takes the prompt as text. Here a text becomes tokens, and tokens bytes, by the gateway's tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvasir_node.gateway.ports import CompletionRefused, Completions, Tokenizer, TokenRequest
from kvasir_proto.errors import Busy, KvasirError, NotReady, UsageError
from kvasir_proto.instants import Instant, between, in_seconds
from kvasir_proto.limits import EndReason
from kvasir_proto.messages.local import GenerateEnd, GenerateRequest, TokenEvent
from kvasir_proto.sampling import SamplingOptions

CLIENT: Final = "local"


async def generate_elsewhere(
    request: GenerateRequest,
    emit: Callable[[TokenEvent], Awaitable[None]],
    *,
    completions: Completions,
    tokenizer: Tokenizer,
    now: Callable[[], Instant],
) -> GenerateEnd:
    """Run one session; ``emit`` gets each token. If cancelled, the session is cancelled too.

    Raises `NotReady` and `UsageError` where it never began, another `KvasirError` where it cannot go on.
    """
    began = now()
    try:
        token_ids = request.token_ids
        if request.prompt is not None:
            token_ids = await tokenizer.tokens_of(request.prompt, is_template=False)
        wanted = TokenRequest(CLIENT, token_ids, SamplingOptions(request.sampling), request.n_tokens, ())
        n_generated, first, last = 0, began, began
        reason: EndReason = "length"
        async with completions.open(wanted) as tokens:
            async for token in tokens:
                last = now()
                first = last if not n_generated else first
                if token.finish == "stop":
                    reason = "end_of_text"
                    break
                position = len(token_ids) + n_generated
                n_generated += 1
                await emit(TokenEvent(position, token.token_id, tokenizer.bytes_of(token.token_id)))
    except CompletionRefused as refusal:
        raise _error_of(refusal) from None
    decode_s = in_seconds(between(first, last))
    statistics: dict[str, Any] = {
        "n_prompt": len(token_ids),
        "n_generated": n_generated,
        "prompt_s": in_seconds(between(began, first)),
        "decode_s": decode_s,
        "tokens_per_second": max(0, n_generated - 1) / decode_s if decode_s else 0.0,
        # The backbone's engine counts these, and tells its own node.
        "rows_retried": None,
        "hook_calls": None,
    }
    return GenerateEnd(reason, "", "", json.dumps(statistics))


def _error_of(refusal: CompletionRefused) -> KvasirError:
    if refusal.kind == "too_long":
        return UsageError(str(refusal))
    return Busy(str(refusal)) if refusal.kind == "busy" else NotReady(str(refusal))
