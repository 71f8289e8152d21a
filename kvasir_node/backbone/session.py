"""A session: one generation, from prompt to its last token, on one trunk.

It decodes the prompt in chunks, samples, emits, and decodes again until a reason to stop. The lease is
checked before each decode and before each token is emitted; an emitted token is never revised. A decode that
fails because an expert's last holder has died is made again, the same, once there is another. The module
knows nothing of where experts are or to whom tokens go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvasir_node.backbone.sampling import Sampler
from kvasir_node.backbone.trunk import Trunk
from kvasir_proto.errors import EngineFailed, NoHolderLeft, UsageError
from kvasir_proto.limits import EndReason
from kvasir_proto.sampling import Sampling

DECODES_MAX: Final = 4
"""How often one ubatch is decoded: holders that come and die again may not keep a session for ever."""


class SessionDeadlineExpired(EngineFailed):
    """The session took longer than its client was willing to wait."""


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """One token of a session: ``position`` in the sequence, its id and the bytes it stands for."""

    position: int
    token: int
    piece: bytes


@dataclass(slots=True)
class SessionOutcome:
    """How a session went so far; durations in nanoseconds."""

    reason: EndReason = "length"
    n_prompt: int = 0
    n_generated: int = 0
    prompt_ns: int = 0
    decode_ns: int = 0
    tokens: list[int] = field(default_factory=list)


def run_session(
    trunk: Trunk,
    prompt: Sequence[int],
    n_tokens: int,
    parameters: Sampling,
    *,
    outcome: SessionOutcome,
    check_authority: Callable[[], object],
    await_holders: Callable[[], bool],
    emit: Callable[[EmittedToken], None],
    cancelled: threading.Event,
    deadline_ns: int,
) -> None:
    """Generate up to ``n_tokens`` after ``prompt`` and keep ``outcome`` true at every moment.

    ``check_authority`` raises when the lease has run out, ``await_holders`` is that of `decode_patiently`;
    ``deadline_ns`` is on the monotonic clock. Raises what a decode raises, `UsageError` for a prompt that
    cannot be run, `SessionDeadlineExpired`.
    """
    if not prompt:
        raise UsageError("the prompt is empty")
    if len(prompt) >= trunk.n_ctx:
        raise UsageError(f"the prompt has {len(prompt)} tokens, the context {trunk.n_ctx}")
    if any(not 0 <= token < trunk.n_vocab for token in prompt):
        raise UsageError(f"the prompt has a token id outside the vocabulary of {trunk.n_vocab}")
    trunk.clear()
    sampler = Sampler(parameters, trunk.n_vocab)
    try:
        outcome.n_prompt = len(prompt)
        started = time.monotonic_ns()
        chunk = trunk.settings.n_ubatch
        for start in range(0, len(prompt), chunk):
            if cancelled.is_set():
                break
            _check(check_authority, deadline_ns)
            part = prompt[start : start + chunk]
            decode_patiently(trunk, part, await_holders, no_logits=start + chunk < len(prompt))
        outcome.prompt_ns = time.monotonic_ns() - started
        started = time.monotonic_ns()
        while True:
            if cancelled.is_set():
                outcome.reason = "cancelled"
                return
            _check(check_authority, deadline_ns)
            token = sampler.sample(trunk.logits(), trunk.position)
            if trunk.is_end_of_generation(token):
                outcome.reason = "end_of_text"
                return
            check_authority()
            emit(EmittedToken(trunk.position, token, trunk.piece(token)))
            outcome.n_generated += 1
            outcome.tokens.append(token)
            outcome.decode_ns = time.monotonic_ns() - started
            if outcome.n_generated >= n_tokens or trunk.position + 1 >= trunk.n_ctx:
                outcome.reason = "length"
                return
            check_authority()  # emitting may have taken long
            decode_patiently(trunk, [token], await_holders)
    finally:
        sampler.close()


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


def check_deadline(deadline_ns: int) -> None:
    """Raise `SessionDeadlineExpired` when that moment of the monotonic clock has passed."""
    if time.monotonic_ns() > deadline_ns:
        raise SessionDeadlineExpired("the session's deadline has passed")


def _check(check_authority: Callable[[], object], deadline_ns: int) -> None:
    check_deadline(deadline_ns)
    check_authority()
