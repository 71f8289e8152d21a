"""A running daemon's swarm as a side of a comparison: the home of its backbone is asked over its socket.

Decides whether a home's daemon can answer at all: it has to be the backbone, of the model that is measured.
The swarm's own sessions go on in a context of their own. It refuses to start or to stop anything.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import trio

from kvasir_node.backbone.traces import Rows, Traces
from kvasir_node.backbone.trunk import Trunk
from kvasir_node.control import collect_text, connect_daemon, request_status
from kvasir_node.locations import Locations
from kvasir_node.measure.engine_answers import answers_in
from kvasir_node.measure.in_process import Continuation, load_vocabulary
from kvasir_node.model.store import StoredModel
from kvasir_proto.errors import EngineFailed, UsageError, error_of, error_of_session
from kvasir_proto.messages.local import EvaluateReply, EvaluateRequest, GenerateRequest, Refusal
from kvasir_proto.sampling import Sampling

_GREEDY: Final = Sampling(temperature=0.0)


async def check_backbone(name: str, locations: Locations, model: StoredModel) -> None:
    """Raise `UsageError` unless this home's daemon is the backbone of a swarm of this model.

    Raises `NotRunning` where there is no daemon.
    """
    try:
        status: Any = json.loads(await request_status(locations))
        node_id, backbone, state = status["node_id"], status["backbone"], status["state"]
        served = status["model"]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineFailed(f"{name}: the daemon's status cannot be read: {error}") from error
    if served is None:
        raise UsageError(f"{name}: this daemon has no model")
    if served["digest"] != model.digest:
        raise UsageError(
            f"{name}: its swarm serves {served['name']} ({served['digest'][:16]}), and what is measured is "
            f"{model.name} ({model.digest[:16]}): name that model with --model"
        )
    if backbone is None:
        raise UsageError(f"{name}: its swarm has no backbone now ({state}: {status['reason']})")
    if backbone != node_id:
        raise UsageError(
            f"{name}: this node is not its swarm's backbone, which alone sees logits: name the home of "
            f"{backbone}, on its machine"
        )


@contextlib.asynccontextmanager
async def open_live_side(
    name: str,
    locations: Locations,
    model: StoredModel,
    directory: Path,
    n_ubatch: int,
    *,
    is_watched: bool,
) -> AsyncIterator[LiveSide]:
    """The swarm of this home's daemon. Raises as `check_backbone`, and what loading a vocabulary raises."""
    await check_backbone(name, locations, model)
    vocabulary = await trio.to_thread.run_sync(load_vocabulary, model)
    try:
        yield LiveSide(name, locations, vocabulary, directory, n_ubatch, is_watched=is_watched)
    finally:
        vocabulary.close()


class LiveSide:
    """A backbone's daemon; every question is a request of its own."""

    def __init__(
        self,
        name: str,
        locations: Locations,
        vocabulary: Trunk,
        directory: Path,
        n_ubatch: int,
        *,
        is_watched: bool,
    ) -> None:
        self.name = name
        self._locations = locations
        self._vocabulary = vocabulary
        self._path = directory / "evaluated.npy"
        self._traces_path = directory / "traces.npz" if is_watched else None
        self._n_ubatch = n_ubatch

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """The model's tokens of a text."""
        return tuple(await trio.to_thread.run_sync(self._vocabulary.tokenize, text))

    async def evaluate(
        self, tokens: Sequence[int], chunk_sizes: Sequence[int], *, looks_inside: bool = True
    ) -> tuple[Rows, Traces | None]:
        """Logits of every position, and what the backbone saw inside. Raises what the daemon reports."""
        traces_path = self._traces_path if looks_inside else None
        request = EvaluateRequest(
            tuple(tokens),
            tuple(chunk_sizes),
            str(self._path),
            None if traces_path is None else str(traces_path),
            self._n_ubatch,
        )
        async with connect_daemon(self._locations) as connection:
            reply = await connection.ask(request)
        if isinstance(reply, Refusal):
            raise error_of(reply.code, f"{self.name}: {reply.reason}")
        if not isinstance(reply, EvaluateReply):
            raise EngineFailed(f"{self.name}: the daemon answered {reply.kind} to a request for logits")
        return await trio.to_thread.run_sync(answers_in, self._path, traces_path)

    async def greedy(self, tokens: Sequence[int], n_tokens: int) -> Continuation:
        """The most likely continuation, as any client gets it. Raises what the daemon reports."""
        request = GenerateRequest(None, tuple(tokens), n_tokens, _GREEDY)
        async with connect_daemon(self._locations) as connection:
            found, _, end = await collect_text(connection, request, None)
        if end.reason == "failed":
            raise error_of_session(end.code, f"{self.name}: {end.detail}")
        return Continuation(tuple(found))
