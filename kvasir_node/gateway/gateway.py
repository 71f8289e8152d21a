"""The gateway's endpoints: which requests there are, and how each becomes a session and an answer.

Brings together what the other modules decide. Prompts and texts are never logged. Nothing here knows where
the backbone is; while it moves, a client sees a pause.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import unquote

import trio

from kvasir_node.gateway.answer_shapes import (
    AnswerHead,
    AnswerShape,
    ChatShape,
    CompletionShape,
    TokenTold,
    Usage,
)
from kvasir_node.gateway.answering import Answering
from kvasir_node.gateway.api_description import api_description
from kvasir_node.gateway.chat_template import ChatTemplates
from kvasir_node.gateway.dashboard import DashboardPage, DashboardStatus
from kvasir_node.gateway.doors import Doors, require_json
from kvasir_node.gateway.ending import Ending
from kvasir_node.gateway.event_stream import HEADERS as EVENT_STREAM_HEADERS
from kvasir_node.gateway.event_stream import EventStream
from kvasir_node.gateway.gateway_metrics import CONTENT_TYPE as METRICS_CONTENT_TYPE
from kvasir_node.gateway.gateway_metrics import GatewayMetrics
from kvasir_node.gateway.http_messages import ClientGone, Headers, HttpHead, HttpReply, HttpRequest
from kvasir_node.gateway.ports import (
    Completions,
    GeneratedToken,
    ServedModel,
    Standing,
    Swarm,
    Tokenizer,
    TokenRequest,
)
from kvasir_node.gateway.refusal import Refusal, refusal_of
from kvasir_node.gateway.text_requests import AnswerOptions, chat_request_of, completion_request_of
from kvasir_node.gateway.turns import whose_turn
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_proto.errors import KvasirError

NOT_READY_RETRY_S: Final = 5.0
_MODELS: Final = "/v1/models"
_API: Final = "/v1/"

Endpoint = Callable[[HttpRequest, HttpReply], Awaitable[None]]


class Gateway:
    """Answers requests for one swarm's model; an `HttpHandler`.

    ``wall_time`` is Unix time, for dates; ``entropy`` gives so many random bytes, for seeds and ids.
    """

    def __init__(
        self,
        swarm: Swarm,
        completions: Completions,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        doors: Doors,
        metrics: GatewayMetrics,
        *,
        wall_time: Callable[[], float] = time.time,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._swarm = swarm
        self._completions = completions
        self._tokenizer = tokenizer
        self._templates = templates
        self._doors = doors
        self._metrics = metrics
        self._ending = Ending()
        self._wall_time = wall_time
        self._entropy = entropy
        self._page = DashboardPage()
        self._status = DashboardStatus(swarm, metrics, trio.current_time)
        self._endpoints: dict[str, tuple[str, Endpoint]] = {
            "/": ("GET", self._dashboard),
            "/status": ("GET", self._tell_status),
            "/health/live": ("GET", self._live),
            "/health/ready": ("GET", self._ready),
            "/metrics": ("GET", self._tell_metrics),
            "/openapi.json": ("GET", self._describe),
            _MODELS: ("GET", self._models),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._complete),
        }

    def end(self) -> None:
        """Have every answer end where it is, with the reason, and those to come."""
        self._ending.begin()

    def check(self, head: HttpHead) -> None:
        """See `HttpHandler`."""
        try:
            self._doors.check(head)
            self._endpoint_of(head)
            require_json(head)
        except Refusal as refusal:
            self._metrics.count_request("none", refusal.status)
            raise

    async def answer(self, request: HttpRequest, reply: HttpReply) -> None:
        """See `HttpHandler`."""
        name, endpoint = self._endpoint_of(request.head)
        counted = _CountedReply(reply)
        try:
            await endpoint(request, counted)
        except Refusal as refused:
            counted.status = refused.status
            raise
        except KvasirError as error:
            refusal = refusal_of(error)
            counted.status = refusal.status
            raise refusal from error
        except ClientGone:
            self._metrics.answers_cut_short.inc()
            raise
        except Exception:
            counted.status = counted.status or 500
            raise
        except BaseException:  # cancelled, by itself or in a group
            self._metrics.answers_cut_short.inc()
            raise
        finally:
            self._metrics.count_request(name, counted.status)

    def _endpoint_of(self, head: HttpHead) -> tuple[str, Endpoint]:
        """The endpoint that is asked, and its name. Raises `Refusal` where there is none."""
        path = head.path.rstrip("/") or "/"
        if path in self._endpoints:
            name, (method, endpoint) = path, self._endpoints[path]
        elif path.startswith(_MODELS + "/"):
            name, method, endpoint = _MODELS + "/{model}", "GET", self._model
        elif path.startswith(_API):
            shown = path[:64]
            raise Refusal(400, f"{shown} is not supported here", parameter=shown, code="unsupported_endpoint")
        else:
            raise Refusal(404, "there is nothing at this path", code="not_found")
        if head.method != method and (head.method, method) != ("HEAD", "GET"):
            allowed = "GET, HEAD" if method == "GET" else method
            raise Refusal(
                405, f"this path takes {allowed}", code="method_not_allowed", headers=(("Allow", allowed),)
            )
        return name, endpoint

    # --- what tells of the gateway and its swarm ------------------------------------------------------------

    async def _live(self, request: HttpRequest, reply: HttpReply) -> None:
        await _send_json(reply, 200, {"status": "live"})

    async def _ready(self, request: HttpRequest, reply: HttpReply) -> None:
        standing = self._swarm.standing()
        if not standing.why_not_ready:
            await _send_json(reply, 200, {"status": "ready"})
            return
        # Why may name members: not for everybody.
        why = {"reason": standing.why_not_ready} if self._doors.is_known(request.head) else {}
        retry = (("Retry-After", f"{NOT_READY_RETRY_S:.0f}"),)
        await _send_json(reply, 503, {"status": "not ready", **why}, retry)

    async def _tell_metrics(self, request: HttpRequest, reply: HttpReply) -> None:
        await reply.send(200, (("Content-Type", METRICS_CONTENT_TYPE),), self._metrics.text())

    async def _dashboard(self, request: HttpRequest, reply: HttpReply) -> None:
        await reply.send(200, self._page.headers, self._page.body)

    async def _tell_status(self, request: HttpRequest, reply: HttpReply) -> None:
        await reply.send(200, (("Content-Type", "application/json"),), self._status.body())

    async def _describe(self, request: HttpRequest, reply: HttpReply) -> None:
        await _send_json(reply, 200, api_description(self._swarm.standing().model))

    async def _models(self, request: HttpRequest, reply: HttpReply) -> None:
        standing = self._swarm.standing()
        models = [] if standing.model is None else [_model_object(standing.model)]
        await _send_json(reply, 200, {"object": "list", "data": models}, _provenance(standing))

    async def _model(self, request: HttpRequest, reply: HttpReply) -> None:
        standing = self._swarm.standing()
        model = _the_model(standing, unquote(request.head.path[len(_MODELS) + 1 :]))
        await _send_json(reply, 200, _model_object(model), _provenance(standing))

    # --- what makes text ------------------------------------------------------------------------------------

    async def _chat(self, request: HttpRequest, reply: HttpReply) -> None:
        asked_at = trio.current_time()
        chat = chat_request_of(request.body, self._draw_seed)
        standing = self._standing_for(chat.options)
        assert standing.model is not None
        with self._ending.cuts():
            prompt = await self._templates.prompt_of(standing.model, chat.messages, int(self._wall_time()))
            token_ids = await self._tokenizer.tokens_of(prompt, is_template=True)
        await self._answer(
            standing, ChatShape(), token_ids, "messages", chat.options, request, reply, asked_at
        )

    async def _complete(self, request: HttpRequest, reply: HttpReply) -> None:
        asked_at = trio.current_time()
        completion = completion_request_of(request.body, self._draw_seed)
        standing = self._standing_for(completion.options)
        assert standing.model is not None
        token_ids = completion.prompt
        if isinstance(token_ids, str):
            with self._ending.cuts():
                token_ids = await self._tokenizer.tokens_of(token_ids, is_template=False)
        elif max(token_ids) >= standing.model.vocabulary_size:
            raise Refusal(400, "prompt has a token that the model does not know", parameter="prompt")
        await self._answer(
            standing, CompletionShape(), token_ids, "prompt", completion.options, request, reply, asked_at
        )

    def _standing_for(self, options: AnswerOptions) -> Standing:
        """How things stand, if a request can be served now. Raises `Refusal`."""
        standing = self._swarm.standing()
        model = _the_model(standing, options.model)
        unknown = [token for token, _ in options.sampling.logit_bias if token >= model.vocabulary_size]
        if unknown:
            raise Refusal(
                400,
                f"logit_bias has token {unknown[0]}, which the model does not know",
                parameter="logit_bias",
            )
        if standing.obstacle:
            raise _not_ready(standing)
        return standing

    async def _answer(
        self,
        standing: Standing,
        shape: AnswerShape,
        token_ids: tuple[int, ...],
        source: str,
        options: AnswerOptions,
        request: HttpRequest,
        reply: HttpReply,
        asked_at: float,
    ) -> None:
        """Generate, and tell it. ``source`` is the parameter that the prompt came from."""
        model = standing.model
        assert model is not None
        n_left = model.context_tokens - len(token_ids)
        if not token_ids:
            raise Refusal(400, f"{source} makes no token at all", parameter=source)
        if n_left < 1:
            raise Refusal(
                400,
                f"{source} has {len(token_ids)} tokens; prompt and answer together have room for "
                f"{model.context_tokens}",
                parameter=source,
                code="context_length_exceeded",
            )
        wanted = TokenRequest(
            client=whose_turn(request.head.client, options.user),
            token_ids=token_ids,
            sampling=options.sampling,
            n_tokens_max=min(n_left, options.n_tokens_max or n_left),
            stop_token_ids=model.stop_token_ids,
            n_top=options.n_top or 0,
        )
        name = shape.prefix + self._entropy(12).hex()
        head = AnswerHead(name, int(self._wall_time()), model)
        answering = Answering(self._tokenizer, options.stop_strings, self._metrics, self._ending, asked_at)
        self._metrics.prompt_tokens.inc(len(token_ids))
        with self._metrics.sessions.track_inprogress():
            if options.is_streamed:
                await self._stream(wanted, answering, shape, head, options, _provenance(standing), reply)
            else:
                await self._send_whole(wanted, answering, shape, head, options, _provenance(standing), reply)

    @asynccontextmanager
    async def _session(self, wanted: TokenRequest) -> AsyncIterator[AsyncIterator[GeneratedToken]]:
        """A session, that a gateway that ends waits for no longer."""
        with self._ending.cuts() as wait:
            async with self._completions.open(wanted) as tokens:
                self._ending.spare(wait)
                yield tokens

    async def _send_whole(
        self,
        wanted: TokenRequest,
        answering: Answering,
        shape: AnswerShape,
        head: AnswerHead,
        options: AnswerOptions,
        headers: Headers,
        reply: HttpReply,
    ) -> None:
        texts: list[str] = []
        all_told: list[TokenTold] = []

        async def keep(text: str, told: tuple[TokenTold, ...]) -> None:
            texts.append(text)
            all_told.extend(told)

        async with self._session(wanted) as tokens:
            finish = await answering.run(tokens, keep)
        choice = shape.whole("".join(texts), None if options.n_top is None else all_told, finish)
        usage = Usage(len(wanted.token_ids), answering.n_generated)
        document = head.document(shape.kind, [choice]) | {"usage": usage.document()}
        await _send_json(reply, 200, document, headers)

    async def _stream(
        self,
        wanted: TokenRequest,
        answering: Answering,
        shape: AnswerShape,
        head: AnswerHead,
        options: AnswerOptions,
        headers: Headers,
        reply: HttpReply,
    ) -> None:
        async with self._session(wanted) as tokens:
            await reply.start(200, (*EVENT_STREAM_HEADERS, *headers))
            events = EventStream(reply)
            # With usage asked for, every piece says that it has none: that is how clients know the last one.
            usage = {"usage": None} if options.with_usage else {}

            async def tell_choice(choice: dict[str, Any]) -> None:
                await events.send(head.document(shape.kind_of_pieces, [choice]) | usage)

            async def tell(text: str, told: tuple[TokenTold, ...]) -> None:
                await tell_choice(shape.piece(text, None if options.n_top is None else told))

            async with open_unwrapping_nursery() as nursery:
                nursery.start_soon(events.keep_alive)
                try:
                    if (opening := shape.opening()) is not None:
                        await tell_choice(opening)
                    finish = await answering.run(tokens, tell)
                    await tell_choice(shape.closing(finish))
                    if options.with_usage:
                        total = Usage(len(wanted.token_ids), answering.n_generated).document()
                        await events.send(head.document(shape.kind_of_pieces, []) | {"usage": total})
                except KvasirError as error:
                    # The head is sent: all that is left is an event that clients take for an error.
                    await events.send(refusal_of(error).document())
                await events.end()
                nursery.cancel_scope.cancel()

    def _draw_seed(self) -> int:
        return int.from_bytes(self._entropy(8), "little")


class _CountedReply:
    """A reply that remembers its status, for what is counted."""

    def __init__(self, reply: HttpReply) -> None:
        self._reply = reply
        self.status = 0
        """0 while nothing was sent."""

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        await self._reply.send(status, headers, body)

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._reply.start(status, headers)

    async def write(self, data: bytes) -> None:
        await self._reply.write(data)

    async def finish(self) -> None:
        await self._reply.finish()


async def _send_json(reply: HttpReply, status: int, document: dict[str, Any], headers: Headers = ()) -> None:
    body = json.dumps(document, ensure_ascii=False).encode()
    await reply.send(status, (("Content-Type", "application/json"), *headers), body)


def _the_model(standing: Standing, name: str) -> ServedModel:
    """The model that the swarm runs, if that is the one that was asked for. Raises `Refusal`."""
    model = standing.model
    if model is None:
        raise _not_ready(standing)
    if name not in (model.name, model.digest):
        raise Refusal(
            404, f"this swarm runs {model.name} and no other model", parameter="model", code="model_not_found"
        )
    return model


def _not_ready(standing: Standing) -> Refusal:
    return Refusal(503, standing.why_not_ready, code="not_ready", retry_after_s=NOT_READY_RETRY_S)


def _model_object(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "kvasir",
        "digest": model.digest,
        "context_tokens": model.context_tokens,
    }


def _provenance(standing: Standing) -> Headers:
    """Whose answer it is, as things stood when it began."""
    if standing.provenance is None:
        return ()
    return (
        ("Kvasir-Swarm", standing.provenance.swarm),
        ("Kvasir-Epoch", str(standing.provenance.epoch)),
        ("Kvasir-Term", str(standing.provenance.term)),
        ("Kvasir-Certificates", standing.provenance.certificates),
    )
