"""The demonstration: a real swarm on this machine, then a single process beside it, then the comparison.

Every node is a daemon of its own with its own home, started by the same command a user would type; they find
each other over libp2p, elect their backbone and serve the shipped model as its plan places it. The single
process is the same llama.cpp on the same weights without a swarm. What is compared is what both computed: the
token ids, and the logits of every position: bit for bit where all nodes compute alike, within the swarm's
tolerance where one of them is made to add in F16. The nodes end with this process however it ends; what they
leave in their directory is the caller's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import trio

from kvasir_node import app
from kvasir_node.config import load_configuration
from kvasir_node.control import collect_text, connect_daemon, request_status
from kvasir_node.local_swarm import (
    RunSettings,
    evaluate_logits,
    generate,
    start_reference,
)
from kvasir_node.locations import Locations, locate
from kvasir_node.measure.statistics import compare_logits, largest_delta, most_by_chance, open_logits
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_proto.errors import DaemonUnreachable, EngineFailed, NotRunning, error_of, error_of_session
from kvasir_proto.messages.local import EvaluateReply, EvaluateRequest, GenerateEnd, GenerateRequest, Refusal
from kvasir_proto.sampling import Sampling
from kvasir_proto.swarm_manifest import Thresholds

READY_TIMEOUT_S: Final = 180.0
"""Seconds until a swarm is ready; one of four is within ten, on a machine that does nothing else."""

STOP_TIMEOUT_S: Final = 20.0
SESSION_TIMEOUT_S: Final = 300.0
_POLL_S: Final = 0.1
_SAY_AGAIN_S: Final = 10.0
_SESSIONS_MAX: Final = 3
"""Sessions that may end before a worker could be killed."""

_PROBE_TOKENS: Final = 4
_STALL_S: Final = 0.3
"""Without text for so long the backbone waits for a worker that was stopped; far below its rows' deadline."""

_LOG_TAIL_BYTES: Final = 2000
_TOLERANCE_POSITIONS: Final = 256
"""Positions over which a verdict by tolerance goes at least, or as many as the text has: in a short text one
position in which a router's choice turned weighs as much as the tolerance allows for all together."""

_TOLERANCE_CHUNK: Final = 32
_VERDICT_WRONG_MAX: Final = 1e-3
"""How often a swarm that differs in as many top tokens as it may would be called different by chance."""

_AUDIT_TIMEOUT_S: Final = 60.0
_AGREEMENT_TIMEOUT_S: Final = 10.0
"""How long other electors are waited for who recompute what the backbone's audit found."""
_EVALUATIONS_MAX: Final = 3
_REPLANNING_S: Final = 4.0
"""How often, and how far apart, a comparison is made again in which the node that adds in F16 had no part."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the user chose. ``kill_worker`` SIGKILLs one holder in the middle of the text; ``f16_model`` is a
    file whose experts are F16; with it one worker adds in F16 and the verdict is by tolerance. With ``liar``
    one worker has that fault behind an honest node's word instead, and the audit is to find it.
    """

    n_workers: int
    n_tokens: int
    prompt: str
    sampling: Sampling
    kill_worker: bool
    f16_model: Path | None = None
    liar: str | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether one node says that it adds in F16."""
        return self.f16_model is not None and self.liar is None

    @property
    def is_by_tolerance(self) -> bool:
        """Whether a node that adds in F16, whatever it says, has a part in the text."""
        return self.f16_model is not None


@dataclass(frozen=True, slots=True)
class DemoNode:
    """One daemon of the demonstration; ``name`` is that of its home."""

    name: str
    process: subprocess.Popen[bytes]
    locations: Locations
    log_file: Path

    async def status(self) -> dict[str, Any]:
        """Its status document. Raises `NotRunning` or `DaemonUnreachable` while it starts."""
        document: dict[str, Any] = json.loads(await request_status(self.locations))
        return document

    async def status_or_none(self) -> dict[str, Any] | None:
        """Its status document; None while it starts, or is too busy to answer."""
        with contextlib.suppress(NotRunning, DaemonUnreachable, EngineFailed):
            return await self.status()
        return None

    def last_words(self) -> str:
        """The last line that it logged, for an error message."""
        lines = self.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").splitlines()
        return next((each for each in reversed(lines) if each.strip()), "none")


@dataclass(frozen=True, slots=True)
class DemoSwarm:
    """The swarm once it is ready: which of its nodes it elected, and the status documents of all."""

    backbone: DemoNode
    workers: list[DemoNode]
    backbone_status: dict[str, Any]
    worker_statuses: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class DemoReporter:
    """Where the demonstration shows what happens: ``say`` a line of progress, ``show`` the swarm's status
    documents once it is ready, ``text`` each piece of text."""

    say: Callable[[str], None]
    show: Callable[[dict[str, Any], list[dict[str, Any]]], None]
    text: Callable[[str], None]


async def run_demo(options: DemoOptions, directory: Path, report: DemoReporter) -> dict[str, Any]:
    """Run it in ``directory``, which is its own; the report that `demo --json` prints.

    Raises `EngineFailed` when the swarm does not come up, and like `error_of_session` when a session fails.
    """
    async with _open_swarm(options, directory, report.say) as swarm:
        try:
            return await _demonstrate(options, swarm, directory, report)
        except NotRunning as error:
            _check_running([swarm.backbone])
            raise EngineFailed(f"{swarm.backbone.name} does not answer any more: {error}") from error


async def _demonstrate(
    options: DemoOptions, swarm: DemoSwarm, directory: Path, report: DemoReporter
) -> dict[str, Any]:
    backbone, started, workers = swarm.backbone, swarm.backbone_status, swarm.worker_statuses
    processes = _processes(started, workers)
    report.show(started, workers)
    request = GenerateRequest(
        prompt=options.prompt,
        token_ids=(),
        n_tokens=options.n_tokens,
        sampling=options.sampling,
    )
    report.text(options.prompt)
    killed: int | None = None
    if options.kill_worker:
        killed, (tokens, text, end) = await _generate_while_killing(swarm, request, report)
    else:
        tokens, text, end = await _generate(backbone, request, report.text)
    if end.reason == "failed":
        raise error_of_session(end.code, end.detail)
    session = json.loads(end.statistics)
    report.text("\n")
    report.say("running the same in a single process")
    reference, compared = await _compare(options, backbone, tokens, directory)
    finished = await backbone.status()
    alive = [node for index, node in enumerate(swarm.workers) if index != killed]
    alive_statuses = [await node.status() for node in alive]
    decisions = _worker_decisions(finished, alive_statuses)
    same_text = reference["tokens"] == tokens
    is_mixed = options.is_mixed
    by_tolerance = options.is_by_tolerance
    as_wanted = _is_within_tolerance(compared) if by_tolerance else compared["max_abs_logit_delta"] == 0.0
    result: dict[str, Any] = {
        "schema_version": 1,
        "passed": bool(
            (same_text or by_tolerance)
            and as_wanted
            and decisions == 0
            and finished["experts_missing_total"] == 0
        ),
        "processes": processes,
        "election": {key: started[key] for key in ("epoch", "term", "votes", "backbone")},
        "placement": _placement(started),
        "model": started["model"],
        "text": text,
        "tokens": len(tokens),
        "token_ids": tokens,
        ("equivalent" if by_tolerance else "exact"): compared,
        "same_tokens_as_single_process": same_text,
        "router": {"worker_decisions": decisions},
        "experts_missing_total": finished["experts_missing_total"],
        # One token is no rate: the first comes with the prompt.
        "tokens_per_second": session["tokens_per_second"] if len(tokens) > 1 else None,
        "single_process_tokens_per_second": reference["tokens_per_second"] if len(tokens) > 1 else None,
        "hook_calls": session["hook_calls"],
    }
    if is_mixed:
        result["mixed"] = _mixed_part(started, alive_statuses, compared)
        result["passed"] = result["passed"] and result["mixed"]["passed"]
    if options.liar is not None:
        by_name = {node.name: each["node_id"] for node, each in zip(alive, alive_statuses, strict=True)}
        planted = by_name[_home_name(options.n_workers + 1)]
        result["audit"] = await _audit_part(options.liar, planted, backbone)
        result["passed"] = result["passed"] and result["audit"]["passed"]
        if by_tolerance:
            result["top1_agreement"] = compared["top1_agreement"]
        else:
            result["text_equals_honest_run"] = same_text
    if killed is not None:
        result |= {
            "killed_pid": workers[killed]["engine"]["pid"],
            "rows_retried": session["rows_retried"],
            "text_equals_uninterrupted": same_text,
        }
        result["passed"] = result["passed"] and session["rows_retried"] >= 1
    return result


async def _generate(
    backbone: DemoNode, request: GenerateRequest, on_text: Callable[[str], None]
) -> tuple[list[int], str, GenerateEnd]:
    async with connect_daemon(backbone.locations) as connection:
        with trio.fail_after(SESSION_TIMEOUT_S):
            return await collect_text(connection, request, on_text)


async def _generate_while_killing(
    swarm: DemoSwarm, request: GenerateRequest, report: DemoReporter
) -> tuple[int, tuple[list[int], str, GenerateEnd]]:
    """SIGKILL a holder while it owes rows, in the middle of the text; its index among the workers.

    Of all holders the one that is asked for most: the plan may give others nothing, or ask them only in need.
    A session that ends before that is run again; the second time the first piece of text is middle enough.
    """
    for attempt in range(_SESSIONS_MAX):
        victim = await _most_asked(swarm, request)
        kill = WorkerKill(
            engine_pid=swarm.worker_statuses[victim]["engine"]["pid"],
            end_node=swarm.workers[victim].process.kill,
            after_pieces=1 if attempt else max(1, request.n_tokens // 3),
        )

        def count(piece: str, kill: WorkerKill = kill) -> None:
            report.text(piece)
            kill.note_piece()

        async with open_unwrapping_nursery() as nursery:
            nursery.start_soon(kill.run)
            outcome = await _generate(swarm.backbone, request, count)
            nursery.cancel_scope.cancel()
        if kill.is_done or outcome[2].reason == "failed":
            return victim, outcome
        report.text("\n")
        report.say("the text ended before the worker could be killed: once more")
    raise EngineFailed(f"{_SESSIONS_MAX} times the text ended before a worker could be killed")


async def _most_asked(swarm: DemoSwarm, request: GenerateRequest) -> int:
    """The index of the worker that the backbone asks for most rows now, as a few tokens show."""
    before = _rows_asked(await swarm.backbone.status())
    few = replace(request, n_tokens=min(request.n_tokens, _PROBE_TOKENS))
    _, _, end = await _generate(swarm.backbone, few, lambda _: None)
    if end.reason == "failed":
        raise error_of_session(end.code, end.detail)
    after = _rows_asked(await swarm.backbone.status())
    asked = [after.get(each["node_id"], 0) - before.get(each["node_id"], 0) for each in swarm.worker_statuses]
    if not any(asked):
        raise EngineFailed("no worker was asked for rows: there is none to be killed")
    return asked.index(max(asked))


def _rows_asked(backbone: dict[str, Any]) -> dict[str, int]:
    """How many rows the backbone has asked of each holder."""
    if backbone["engine_statistics"] is None:
        raise EngineFailed("the backbone's engine did not answer when it was asked for its counters")
    rows: dict[str, int] = backbone["engine_statistics"]["dispatch"]["rows_by_holder"]
    return rows


class WorkerKill:
    """The end of a worker that owes rows: stopped after some pieces of text, killed once no more come.

    Stopped first, it is sure to have rows outstanding when it dies; a kill between two layers would be
    noticed before anything was asked of it. While text goes on coming it is asked for nothing, or has
    answered before it stopped. A worker that is not killed in the end goes on.
    """

    def __init__(self, engine_pid: int, end_node: Callable[[], None], after_pieces: int) -> None:
        self._engine_pid = engine_pid
        self._end_node = end_node
        self._after_pieces = after_pieces
        self._pieces = 0
        self._is_time = trio.Event()
        self.is_done = False

    def note_piece(self) -> None:
        """A piece of the session's text has come."""
        self._pieces += 1
        if self._pieces >= self._after_pieces:
            self._is_time.set()

    async def run(self) -> None:
        """Wait for the time, then do it; cancelled when the session is over."""
        await self._is_time.wait()
        os.kill(self._engine_pid, signal.SIGSTOP)
        try:
            seen = -1
            while seen != self._pieces:
                seen = self._pieces
                await trio.sleep(_STALL_S)
            os.kill(self._engine_pid, signal.SIGKILL)
            self._end_node()
            self.is_done = True
        finally:
            if not self.is_done:
                os.kill(self._engine_pid, signal.SIGCONT)


async def _compare(
    options: DemoOptions, backbone: DemoNode, tokens: list[int], directory: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The single process: the same generation, then both sides' logits over prompt and text."""
    home = app.open_home(backbone.locations, load_configuration(backbone.locations.config_file, {}))
    model = home.models.list()[0]
    configuration = home.configuration
    settings = RunSettings(
        n_ctx=model.context_length(configuration.engine_context_tokens),
        n_ubatch=configuration.engine_ubatch_tokens,
        n_threads=configuration.engine_threads,
        device=configuration.engine_device,
    )
    async with open_unwrapping_nursery() as nursery:
        engine, _ = await start_reference(nursery, model, settings, backbone.locations.runtime)
        n_further = max(0, _TOLERANCE_POSITIONS - len(tokens)) if options.is_by_tolerance else 0
        alone = await generate(
            engine,
            options.prompt,
            options.n_tokens + n_further,
            sampling=options.sampling,
        )
        further = alone.tokens[options.n_tokens :]
        token_ids = (*alone.prompt_ids, *tokens, *further)
        chunk_sizes = (len(alone.prompt_ids), *([1] * len(tokens)), *_chunks(len(further)))
        ours, theirs = directory / "swarm.npy", directory / "single.npy"
        await evaluate_logits(engine, token_ids, chunk_sizes, theirs)
        nursery.cancel_scope.cancel()
    request = EvaluateRequest(token_ids, chunk_sizes, str(ours))
    await _evaluate_swarm(backbone, request)
    for _ in range(_EVALUATIONS_MAX if options.is_by_tolerance else 0):
        if largest_delta(theirs, ours) > 0.0:
            break
        # While the single process ran the plan took the F16 node for slow; now there is room for it again.
        await trio.sleep(_REPLANNING_S)
        await _evaluate_swarm(backbone, request)
    reference = {
        "tokens": list(alone.tokens[: options.n_tokens]),
        "tokens_per_second": alone.tokens_per_second,
    }
    comparison = compare_logits(open_logits(theirs), open_logits(ours), token_ids)
    compared = {
        "max_abs_logit_delta": comparison.max_abs_delta,
        "top1_agreement": comparison.top1_agreement,
        "compared_positions": len(token_ids),
    }
    if options.is_by_tolerance:
        compared |= {"mean_kld": comparison.mean_kld, "maximum_kld": comparison.maximum_kld}
    return reference, compared


def _chunks(n_tokens: int) -> list[int]:
    """Sizes of the ubatches of a text that is evaluated and was generated by nobody here."""
    return [min(_TOLERANCE_CHUNK, n_tokens - first) for first in range(0, n_tokens, _TOLERANCE_CHUNK)]


async def _evaluate_swarm(backbone: DemoNode, request: EvaluateRequest) -> None:
    """Have the swarm write its logits."""
    async with connect_daemon(backbone.locations) as connection:
        with trio.fail_after(SESSION_TIMEOUT_S):
            reply = await connection.ask(request)
    if isinstance(reply, Refusal):
        raise error_of(reply.code, reply.reason)
    if not isinstance(reply, EvaluateReply):
        raise EngineFailed(f"the swarm's logits could not be had: {reply}")


def _is_within_tolerance(compared: dict[str, Any]) -> bool:
    """Whether the logits are what the manifest calls equivalent, as far as so few positions can say."""
    thresholds = Thresholds()
    n_positions = compared["compared_positions"]
    n_other = round((1.0 - compared["top1_agreement"]) * n_positions)
    n_other_max = most_by_chance(n_positions, 1.0 - thresholds.top1_agreement_min, _VERDICT_WRONG_MAX)
    return bool(n_other <= n_other_max and compared["mean_kld"] <= thresholds.mean_kld_max)


def _mixed_part(
    backbone: dict[str, Any], workers: list[dict[str, Any]], compared: dict[str, Any]
) -> dict[str, Any]:
    """What the swarm made of the node that adds in F16: bulk experts alone, and rows of them computed.

    `in_comparison`: a plan may have taken it for slow meanwhile, on a busy machine; then the logits are those
    of the others.
    """
    (f16,) = (each for each in backbone["members"] if each["accumulation"] == "F16")
    rows = next(each["engine_statistics"]["rows"] for each in workers if each["node_id"] == f16["node_id"])
    thresholds = Thresholds()
    return {
        "passed": f16["ranks"] == ["bulk"] and rows > 0,
        "node": f16["node_id"],
        "ranks": f16["ranks"],
        "rows": rows,
        "in_comparison": compared["max_abs_logit_delta"] > 0.0,
        "top1_agreement_min": thresholds.top1_agreement_min,
        "mean_kld_max": thresholds.mean_kld_max,
    }


async def _audit_part(liar: str, planted: str, backbone: DemoNode) -> dict[str, Any]:
    """Whom the backbone's audit has accused, and how many electors who recomputed it agree by then: waited
    for, since rows are looked at behind the text.
    """
    deadline = time.monotonic() + _AUDIT_TIMEOUT_S
    agreed_by = time.monotonic() + _AGREEMENT_TIMEOUT_S
    accused: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        members = (await backbone.status())["members"]
        accused = [_accusation(liar, each) for each in members if _is_accused(each)]
        found = next((each for each in accused if each["node"] == planted), None)
        if found is not None and (found["electors"] or time.monotonic() > agreed_by):
            break
        if found is None:
            agreed_by = time.monotonic() + _AGREEMENT_TIMEOUT_S
        await trio.sleep(_POLL_S)
    return {
        "planted": planted,
        "fault": liar,
        "accused": accused,
        "passed": [each["node"] for each in accused] == [planted],
    }


def _is_accused(member: dict[str, Any]) -> bool:
    return member["audit"] is not None or member["quarantined_s"] is not None


def _accusation(liar: str, member: dict[str, Any]) -> dict[str, Any]:
    """What is held against a member. Where single rows are wrong those that were found are what the fault
    touched, and one that is not finite is enough; else it is all that the node was asked.
    """
    audit = member["audit"] or {"verdict": "quarantined", "reason": member["reason"], "foreign": 1}
    is_in_single_rows = liar in ("nan", "wrong-expert")
    return {
        "node": member["node_id"],
        "verdict": audit["verdict"],
        "reason": audit["reason"],
        "rows_touching_fault": audit["foreign" if is_in_single_rows else "rows_asked"],
        "electors": member["verdict"]["electors"] if member["verdict"] is not None else 0,
    }


def _processes(backbone: dict[str, Any], workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    processes = []
    for role, document in [("backbone", backbone), *(("worker", each) for each in workers)]:
        engine = document["engine"]
        processes.append(
            {
                "role": role,
                "pid": engine["pid"],
                "control_pid": document["pid"],
                "backend": engine["backend"],
                "node_id": document["node_id"],
            }
        )
    return processes


def _placement(backbone: dict[str, Any]) -> list[dict[str, Any]]:
    """What the backbone's plan makes of each node: the ranks it fills, and what they follow from."""
    own = {**backbone, "shards": backbone["n_experts_held"]}
    return [
        {
            "node": each["node_id"],
            "accumulation": each["accumulation"],
            "ranks": each["ranks"],
            "experts": each["shards"],
        }
        for each in (own, *backbone["members"])
    ]


def _worker_decisions(backbone: dict[str, Any], workers: list[dict[str, Any]]) -> int:
    """Rows that workers computed and nobody had routed to them.

    The backbone counts what it asked of each holder, each worker what it computed; a worker that chose
    experts or rows of its own would show here. Fewer computed than asked are no choice: a worker that is
    about to give up experts refuses, and another holder computes those rows.
    """
    if any(each["engine_statistics"] is None for each in (backbone, *workers)):
        raise EngineFailed("an engine did not answer when it was asked for its counters")
    asked = backbone["engine_statistics"]["dispatch"]["rows_by_holder"]
    return sum(max(0, each["engine_statistics"]["rows"] - asked.get(each["node_id"], 0)) for each in workers)


@contextlib.asynccontextmanager
async def _open_swarm(
    options: DemoOptions, directory: Path, say: Callable[[str], None]
) -> AsyncIterator[DemoSwarm]:
    """The elected backbone and the others, ready; all of them are gone at the end."""
    nodes: list[DemoNode] = []
    n_workers, model = options.n_workers, options.f16_model
    try:
        say("founding a swarm")
        home = directory / _home_name(1)
        locations = locate(home, _environment())
        founder = app.open_home(locations, load_configuration(locations.config_file, {}))
        app.found_swarm(founder, app.resolve_model(founder, str(model) if model else None))
        say(f"starting {n_workers + 1} nodes, each a daemon of its own")
        # Whoever is elected is to wait for all the others before it places any expert. With one holder for
        # each expert, what the node that adds in F16 holds is computed by it and nobody else.
        common = ["--workers-min", str(n_workers)]
        common += ["--model", str(model)] if model else []
        common += ["--holders", "1"] if options.is_mixed else []
        exact = [*common, *_memory_option(founder, n_workers)] if options.is_mixed else common
        nodes.append(_start_node(home, *exact))
        address = (await _wait_status(nodes, 0, lambda document: bool(document["addresses"])))["addresses"][0]
        for number in range(2, n_workers + 2):
            own = exact
            if number == n_workers + 1 and options.liar is not None:
                # A backbone computes what the plan gives it itself: it is not to be the liar.
                own = [*common, "--kernel", f"liar-{options.liar}", "--ranks", "output,bulk"]
            elif number == n_workers + 1 and options.is_mixed:
                own = [*common, "--kernel", "emulated-f16"]
            nodes.append(_start_node(directory / _home_name(number), "--join", address, *own))
        say("waiting until they have found each other, elected a backbone and loaded their experts")
        yield await _wait_ready(nodes, say)
    finally:
        with trio.CancelScope(shield=True):
            await _stop_nodes(nodes)


def _home_name(number: int) -> str:
    return f"node-{number}"


def _memory_option(founder: app.Home, n_workers: int) -> list[str]:
    """What each node but the one that adds in F16 offers: so little that the slow one is needed."""
    experts_bytes = founder.models.list()[0].manifest.experts_size_bytes()
    return ["--memory-mib", str(1 + experts_bytes * 9 // (8 * n_workers) // (1 << 20))]


async def _wait_ready(nodes: list[DemoNode], say: Callable[[str], None]) -> DemoSwarm:
    """Wait until every node is ready and all serve the plan of one backbone; say now and then for what."""
    started = said = time.monotonic()
    while True:
        _check_running(nodes)
        statuses = [await node.status_or_none() for node in nodes]
        waits_for = what_is_not_ready({node.name: each for node, each in zip(nodes, statuses, strict=True)})
        now = time.monotonic()
        if not waits_for:
            break
        if now - started > READY_TIMEOUT_S:
            raise EngineFailed(f"the swarm was not ready in {READY_TIMEOUT_S:g} s: {waits_for}")
        if now - said > _SAY_AGAIN_S:
            said = now
            say(f"still waiting after {now - started:.0f} s: {waits_for}")
        await trio.sleep(_POLL_S)
    ready = [(node, each) for node, each in zip(nodes, statuses, strict=True) if each is not None]
    others = [(node, each) for node, each in ready if each["node_id"] != each["backbone"]]
    ((backbone, document),) = (each for each in ready if each not in others)
    return DemoSwarm(backbone, [node for node, _ in others], document, [each for _, each in others])


def what_is_not_ready(statuses: Mapping[str, dict[str, Any] | None]) -> str:
    """What a swarm of these nodes still lacks, in a few words; empty when it is ready.

    By name: each node's status document, None while it does not answer. Of those that the plan gives nothing
    no more is asked than to follow the same backbone, and of one that the swarm has found out already no
    more than to know it.
    """
    for name, document in statuses.items():
        if document is None:
            return f"{name} does not answer yet"
        is_found_out = document["verdict"] is not None and document["state"] == "degraded"
        if document["state"] != "ready" and not is_found_out:
            reason = f", {document['reason']}" if document["reason"] else ""
            return f"{name} is {document['state']}{reason}"
    documents = {name: each for name, each in statuses.items() if each is not None}
    terms = {(each["backbone"], each["epoch"], each["term"]) for each in documents.values()}
    if len(terms) > 1:
        return f"the nodes follow {len(terms)} different terms"
    leading = [each for each in documents.values() if each["node_id"] == each["backbone"]]
    if not leading:
        return "none of the nodes is the backbone"
    wanted = _version(leading[0])
    holders = {each["node_id"] for each in leading[0]["members"] if each["shards"]}
    for name, document in documents.items():
        if document["node_id"] in holders and _version(document) != wanted:
            return f"{name} has not heard of revision {wanted[2]} of the plan"
    return ""


def _version(document: dict[str, Any]) -> tuple[int, int, int]:
    """Which plan a node knows."""
    plan = document["plan"]
    return plan["epoch"], plan["term"], plan["revision"]


def _environment() -> dict[str, str]:
    """What the nodes see of ours: no setting of the user's own node. Where things are depends on it too."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVASIR_")}


def _share_measurements(measurements: Path, directory: Path) -> None:
    """Have a node take what is known of this machine's kernels from beside ``directory``, and keep it there.

    Its home is new each time, and its kernels are the same ones each time.
    """
    shared = directory.parent / measurements.name
    shared.mkdir(mode=0o700, exist_ok=True)
    measurements.parent.mkdir(mode=0o700, exist_ok=True)
    measurements.symlink_to(shared)


def _start_node(home: Path, *arguments: str) -> DemoNode:
    home.mkdir(mode=0o700, exist_ok=True)
    _share_measurements(locate(home, _environment()).measurements, home.parent)
    log_file = home / "log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "kvasir_node"),
                *("--home", str(home), "run", "--stop-on-eof", *arguments),
            ],
            # It holds the other end: when this process ends, however it does, its nodes end too.
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=_environment() | {"NO_COLOR": "1", "KVASIR_GATEWAY_ENABLED": "false"},
            start_new_session=True,
        )
    return DemoNode(home.name, process, locate(home, _environment()), log_file)


async def _wait_status(
    nodes: list[DemoNode], index: int, condition: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Wait until a node's status fulfils ``condition``; fails at once when any node has died."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    document: dict[str, Any] | None = None
    while time.monotonic() < deadline:
        _check_running(nodes)
        document = await nodes[index].status_or_none()
        if document is not None and condition(document):
            return document
        await trio.sleep(_POLL_S)
    state = f"{document['state']}: {document['reason']}" if document else "it does not answer"
    raise EngineFailed(f"{nodes[index].name} was not ready in {READY_TIMEOUT_S:g} s ({state})")


def _check_running(nodes: list[DemoNode]) -> None:
    for node in nodes:
        if node.process.poll() is not None:
            status, words = node.process.returncode, node.last_words()
            raise EngineFailed(f"{node.name} ended with status {status}, its last words: {words}")


async def _stop_nodes(nodes: list[DemoNode]) -> None:
    """Stop them, the founder last; kill what does not stop."""
    async with open_unwrapping_nursery() as nursery:
        for node in reversed(nodes):
            nursery.start_soon(_stop_node, node)


async def _stop_node(node: DemoNode) -> None:
    # Not by its control socket: one that is just starting does not listen there yet.
    node.process.terminate()
    with trio.move_on_after(STOP_TIMEOUT_S):
        await trio.to_thread.run_sync(node.process.wait, abandon_on_cancel=True)
    node.process.kill()  # nothing happens to one that has ended
    await trio.to_thread.run_sync(node.process.wait)
    if node.process.stdin is not None:
        node.process.stdin.close()
    # Under a long path the socket's directory is elsewhere.
    shutil.rmtree(node.locations.runtime, ignore_errors=True)
