"""This node's gateway: from the daemon's first moment to its last, whatever becomes of the swarm.

Decides when it listens (at once; a port that is taken is tried again, since a node's first job is its
swarm), when the model's vocabulary is read (as soon as there is a model), and how it ends. It is also what
the gateway sees of the swarm (`gateway.ports.Swarm`), made of what the node knows. Where sessions run is not
known here, nor how a socket is opened.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import trio

from kvasir_node.backoff import retry_delay_s
from kvasir_node.driver.gateway_standing import ReadModel, standing_of
from kvasir_node.driver.status_report import StatusSources, status_document
from kvasir_node.gateway.chat_template import ChatTemplates
from kvasir_node.gateway.doors import Doors
from kvasir_node.gateway.gateway import Gateway
from kvasir_node.gateway.gateway_metrics import GatewayMetrics
from kvasir_node.gateway.http_server import HttpServer
from kvasir_node.gateway.ports import Completions, Standing, Tokenizer
from kvasir_node.model.store import StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.telemetry import get_logger
from kvasir_node.tokenizer.vocabulary import Vocabulary
from kvasir_proto.errors import KvasirError, NotReady, PortInUse
from kvasir_proto.instants import Instant

log = get_logger()

END_TIMEOUT_S: Final = 3.0
"""How long answers may take to end when the daemon stops: what they wait for ends at once, so that this is
for clients that read slowly."""

CHILD_IDLE_S: Final = 60.0
"""How long a child that has no text to make or to take apart is kept: starting one takes a second."""

LISTEN_DELAY_FIRST_S: Final = 1.0
LISTEN_DELAY_MAX_S: Final = 30.0
READ_DELAY_FIRST_S: Final = 1.0
READ_DELAY_MAX_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """What the configuration says of the gateway, and of what a session may be."""

    doors: Doors
    port: int
    context_tokens: int


class ModelTokenizer(Tokenizer, Protocol):
    """A tokenizer that has to be told where its model's vocabulary is."""

    async def read(self, path: Path, metadata_sha256: bytes) -> Vocabulary:
        """The vocabulary of a file that Kvasir wrote, whose metadata have this digest.

        Raises `KvasirError`.
        """

    async def end_when_idle(self, idle_s: float) -> None:
        """Until cancelled, keep nothing for texts that do not come for so long. After `read`."""


class GatewayDuty:
    """The gateway of one daemon. `run` until `end` or cancelled."""

    def __init__(
        self,
        *,
        settings: GatewaySettings,
        completions: Completions,
        tokenizer: ModelTokenizer,
        templates: ChatTemplates,
        open_listeners: Callable[[str, int], Awaitable[Sequence[trio.SocketListener]]],
        known: Callable[[], StatusSources],
        wait_model: Callable[[], Awaitable[StoredModel]],
        now: Callable[[], Instant],
    ) -> None:
        """``known`` is what the node knows now, ``wait_model`` gives the swarm's model once it is here.

        ``open_listeners`` listens at an address and port; it raises `PortInUse` or another `KvasirError`.
        """
        self._settings = settings
        self._open_listeners = open_listeners
        self._known = known
        self._wait_model = wait_model
        self._now = now
        self._model: ReadModel | None = None
        self._why_no_model = ""
        self._address: str | None = None
        """Where it listens; None while it does not."""
        self._reason = "it is being opened"
        self._tokenizer = tokenizer
        self._templates = templates
        metrics = GatewayMetrics()
        self._gateway = Gateway(self, completions, tokenizer, templates, settings.doors, metrics)
        self._server = HttpServer(self._gateway)
        metrics.watch_connections(lambda: self._server.n_connections)

    # -- gateway.ports.Swarm -----------------------------------------------------------------------

    def standing(self) -> Standing:
        """See `Swarm`."""
        return standing_of(self._known(), self._model, self._why_no_model)

    def status(self) -> Mapping[str, Any]:
        """See `Swarm`: the status document, without what only an engine knows."""
        return status_document(self._known(), self._now())

    # -- for this node's own user ------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's vocabulary, once there is one."""
        return self._tokenizer

    def require_model(self) -> None:
        """Raise `NotReady` while the model's vocabulary is not read."""
        if self._model is None:
            raise NotReady(self._why_no_model or "the model's vocabulary is being read")

    # -- life --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Answer clients until `end`, or cancelled."""
        async with open_unwrapping_nursery() as nursery:
            nursery.start_soon(self._read_model)
            nursery.start_soon(self._templates.end_when_idle, CHILD_IDLE_S)
            await self._listen()
            nursery.cancel_scope.cancel()

    async def end(self) -> None:
        """Let answers come to their end, with the reason; in bounded time."""
        self._gateway.end()
        await self._server.end(END_TIMEOUT_S)

    def report(self) -> dict[str, Any]:
        """The gateway's part of the status document."""
        return {
            "is_enabled": True,
            "address": self._address,
            "is_answering": self._address is not None,
            "needs_token": self._settings.doors.token is not None,
            "reason": self._reason,
        }

    async def _listen(self) -> None:
        host, port = self._settings.doors.address, self._settings.port
        failures = 0
        while True:
            try:
                listeners = await self._open_listeners(host, port)
                break
            except PortInUse as error:
                self._reason = f"{error}; gateway.port chooses another one"
            except KvasirError as error:
                self._reason = str(error)
            (log.debug if failures else log.warning)("gateway_not_listening", reason=self._reason)
            failures += 1
            await trio.sleep(retry_delay_s(failures, LISTEN_DELAY_FIRST_S, LISTEN_DELAY_MAX_S))
        shown = f"[{host}]" if ":" in host else host
        self._address, self._reason = f"http://{shown}:{listeners[0].socket.getsockname()[1]}", ""
        log.info("gateway_listening", address=self._address)
        try:
            await self._server.serve(listeners)
        finally:
            self._address, self._reason = None, "the node is stopping"

    async def _read_model(self) -> None:
        """Have the model's vocabulary read once, then see to it that the tokenizer's child goes when idle."""
        model = await self._wait_model()
        failures = 0
        while True:
            try:
                vocabulary = await self._tokenizer.read(model.backbone_path, model.manifest.metadata_sha256)
                break
            except KvasirError as error:
                self._why_no_model = str(error)
                log.warning("vocabulary_not_read", reason=str(error))
            failures += 1
            await trio.sleep(retry_delay_s(failures, READ_DELAY_FIRST_S, READ_DELAY_MAX_S))
        self._model = ReadModel(
            vocabulary, model.context_length(self._settings.context_tokens), model.taken_in_at_s()
        )
        await self._tokenizer.end_when_idle(CHILD_IDLE_S)
