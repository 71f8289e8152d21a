"""The failure matrix: every fault of the data plane at every moment, on real processes.

``python -m tests.loopback.failure_matrix`` runs all cells and prints them as a table; the test beside it runs
a part. A backbone engine and three worker engines live through all of it: *steady* never does wrong, *faulty*
does what the cell says, and *early* fails before or after it where a cell needs two. What is expected is
documented in ``docs/reference/failures.md``. Each cell ends with everything connected again, the same text,
and every process holding what it held before: descriptors, sockets, threads, children.
"""

from __future__ import annotations

import enum
import functools
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvasir_node.engine.lease import boottime_ns
from kvasir_node.model.store import ModelStore, StoredModel
from kvasir_proto.ids import NodeId, SessionId, node_id_of
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import (
    ConnectHolder,
    DiallerExpected,
    ExpectDialler,
    Generate,
    HolderConnected,
    HolderLost,
    Listen,
    Listening,
    LoadShard,
    LoadTrunk,
    RemoveHolder,
    SessionEnded,
    SessionOpened,
    SetFence,
    SetLease,
    ShardLoaded,
    TokenEmitted,
    TrunkLoaded,
)
from kvasir_proto.sampling import Sampling, SamplingOptions
from tests.loopback import misbehaving_engine
from tests.loopback.engine_process import EngineProcess, Resources, wait_until
from tests.loopback.misbehaving_engine import (
    DIRECTORY_VARIABLE,
    SLOW_S,
    Fired,
    Script,
    go_on,
    write_reply_floor,
)
from tests.loopback.misbehaving_engine import Fault as Deed
from tests.model_makers import ModelShape, make_qwen3moe

EPOCH: Final = 0
TERM: Final = 1
PROMPT: Final = tuple(range(3, 30))
N_TOKENS: Final = 16
N_UBATCH: Final = 32
"""The whole prompt in one ubatch: a holder's pass 0 is the prompt, every later one is one token."""

SHAPE: Final = ModelShape()
PASS: Final = 3
"""The pass in which faults happen that are not the prompt's."""

MIDDLE_LAYER: Final = 1
COVERAGE_PATIENCE_NS: Final = 100_000_000
SHORT_FLOOR_NS: Final = 1_000_000_000
LONG_FLOOR_NS: Final = 60_000_000_000
"""Of holders that are not meant to be late, however busy the machine is."""

HONEST: Final = Script()
TOKEN_LIFETIME_NS: Final = 10_000_000_000
LEASE_NS: Final = 3600 * 1_000_000_000


class Fault(enum.Enum):
    """What goes wrong: the rows of the table."""

    KILLED = "killed"
    STOPPED = "stopped"
    SLOW = "slow"
    HALF_FRAME = "half a frame"
    GARBAGE = "garbage"
    WRONG_CERTIFICATE = "wrong certificate"
    WRONG_DIALLER = "wrong dialler certificate"
    EXPIRED_TOKEN = "expired token"
    REPLAYED_TOKEN = "replayed token"
    CLOSED_MID_REPLY = "closed mid-reply"
    LATE = "answers late"
    TWICE = "answers twice"
    FOREIGN_REQUEST = "answers another request"
    NAN = "NaN"
    NAN_TWICE = "NaN on two nodes"
    WRONG_SHAPE = "wrong shape"
    FOREIGN_EXPERT = "foreign ids"
    WRONG_TERM = "wrong term"


class Moment(enum.Enum):
    """When it goes wrong: the columns of the table."""

    PREFILL = "prefill"
    DECODE = "decode"
    FIRST_LAYER = "first layer"
    LAST_LAYER = "last layer"
    RETRY = "during retry"
    ALONE = "nobody else"


CODES: Final[dict[Fault, str | None]] = {
    Fault.KILLED: "closed",
    Fault.STOPPED: "late",
    Fault.SLOW: None,
    Fault.HALF_FRAME: "late",
    Fault.GARBAGE: "malformed",
    Fault.WRONG_CERTIFICATE: "wrong_certificate",
    Fault.WRONG_DIALLER: "unreachable",
    Fault.EXPIRED_TOKEN: "unreachable",
    Fault.REPLAYED_TOKEN: "unreachable",
    Fault.CLOSED_MID_REPLY: "closed",
    Fault.LATE: "late",
    Fault.TWICE: "unexpected_reply",
    Fault.FOREIGN_REQUEST: "unexpected_reply",
    Fault.NAN: "non_finite",
    Fault.NAN_TWICE: None,
    Fault.WRONG_SHAPE: "shape_invalid",
    Fault.FOREIGN_EXPERT: "refused_foreign_expert",
    Fault.WRONG_TERM: "refused_stale_term",
}
"""The code with which the backbone gives a holder up, or a newcomer; None: it does not."""

AT_CONNECTION: Final = frozenset(
    {Fault.WRONG_CERTIFICATE, Fault.WRONG_DIALLER, Fault.EXPIRED_TOKEN, Fault.REPLAYED_TOKEN}
)
"""Faults of a newcomer's connection, made while a holder keeps the backbone waiting at the moment."""


@dataclass(frozen=True)
class Cell:
    """One fault at one moment."""

    fault: Fault
    moment: Moment

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.fault.value}, {self.moment.value}"

    @property
    def script(self) -> Script:
        """What the faulty worker is to do."""
        match self.moment:
            case Moment.PREFILL:
                return Script(self.deed, MIDDLE_LAYER, 0)
            case Moment.DECODE:
                return Script(self.deed, None, PASS)
            case Moment.FIRST_LAYER:
                return Script(self.deed, 0, PASS)
            case Moment.LAST_LAYER:
                return Script(self.deed, SHAPE.n_layer - 1, PASS)
            case Moment.RETRY:
                return Script(self.deed)  # it is asked for nothing before
            case Moment.ALONE:
                return Script(self.deed, MIDDLE_LAYER, PASS)

    @property
    def deed(self) -> Deed:
        """What a worker does of it."""
        if self.fault in AT_CONNECTION:
            return Deed.HOLD
        return Deed.NAN if self.fault is Fault.NAN_TWICE else Deed(self.fault.value)

    @property
    def reply_floor_ns(self) -> int:
        """How long the backbone waits for the faulty worker."""
        return SHORT_FLOOR_NS if CODES[self.fault] == "late" else LONG_FLOOR_NS


CELLS: Final = tuple(Cell(fault, moment) for fault in Fault for moment in Moment)


@dataclass
class Outcome:
    """What came of one session."""

    tokens: list[int]
    lost: list[tuple[NodeId, str]]
    end: SessionEnded


@dataclass
class Worker:
    """A worker engine, and the directory its misbehaviour is written in."""

    engine: EngineProcess
    port: int
    directory: Path


@dataclass(frozen=True)
class Part:
    """A worker in a topology: what it holds, what it is asked for first, and what it will do wrong."""

    name: str
    shard: ShardSet
    primary: ShardSet
    script: Script = HONEST
    reply_floor_ns: int = LONG_FLOOR_NS


def experts(first: int, end: int) -> ShardSet:
    """These experts of every layer."""
    return ShardSet.from_ranges((layer, first, end) for layer in range(SHAPE.n_layer))


NOTHING: Final = ShardSet()
ALL: Final = experts(0, SHAPE.n_expert)
FIRST_PART: Final = experts(0, 5)
SECOND_PART: Final = experts(5, SHAPE.n_expert)


def topology_of(cell: Cell) -> tuple[Part, ...]:
    """Who serves in a cell, in the order of connection.

    Of two that hold an expert and are not asked first, the backbone takes the one that connected last.
    """
    faulty = functools.partial(Part, "faulty", script=cell.script, reply_floor_ns=cell.reply_floor_ns)
    second_nan = Part("early", ALL, NOTHING, Script(Deed.NAN))
    match cell.moment:
        case Moment.RETRY:
            first = Deed.NAN if cell.fault is Fault.NAN_TWICE else Deed.CLOSED
            early = Part("early", ALL, FIRST_PART, Script(first, MIDDLE_LAYER, PASS))
            return Part("steady", ALL, SECOND_PART), early, faulty(shard=ALL, primary=NOTHING)
        case Moment.ALONE:
            others = [Part("steady", SECOND_PART, SECOND_PART)]
        case _:
            others = [Part("steady", ALL, SECOND_PART)]
    if cell.fault is Fault.NAN_TWICE:
        others.append(second_nan)
    return *others, faulty(shard=FIRST_PART, primary=FIRST_PART)


def made_honest(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The same holders, and nothing goes wrong."""
    return tuple(Part(each.name, each.shard, each.primary) for each in parts)


class FailureMatrix:
    """The processes, and the cells on them. Made by `failure_matrix`."""

    def __init__(self, model: StoredModel, directory: Path) -> None:
        self._model = model
        self._directory = directory
        self._processes: list[EngineProcess] = []
        floors = directory / "floors"
        floors.mkdir()
        self._floors = floors
        self._backbone = self._start("backbone", floors)
        self._backbone.send(SetLease(EPOCH, TERM, boottime_ns() + LEASE_NS))
        trunk = LoadTrunk(
            request=1,
            backbone_path=str(model.backbone_path),
            manifest_path=str(model.manifest_path),
            n_ctx=256,
            n_ubatch=N_UBATCH,
            threads=1,
            hooked=True,
            kv_type="f16",
            compact_activations=False,
            partial_sums=False,
            coverage_patience_ns=COVERAGE_PATIENCE_NS,
            device="none",
            rpc=None,
        )
        self._backbone.send(trunk)
        self._backbone.wait(TrunkLoaded)
        self._workers = {name: self._start_worker(name) for name in ("steady", "early", "faulty")}
        self._steady_token = b""
        self._undisturbed: dict[tuple[Part, ...], dict[str, Resources]] = {}
        self._connect_all(made_honest(topology_of(Cell(Fault.NAN, Moment.DECODE))))
        outcome = self._run_session()
        self.tokens = outcome.tokens
        assert (outcome.end.reason, outcome.lost) == ("length", []), outcome

    # -- processes ---------------------------------------------------------------------------------

    def _start(self, role: str, directory: Path) -> EngineProcess:
        engine = EngineProcess(
            "backbone" if role == "backbone" else "worker",
            self._directory,
            self._directory / f"{directory.name}.log",
            module="kvasir_node.engine" if directory.name == "steady" else misbehaving_engine.__name__,
            variables={DIRECTORY_VARIABLE: str(directory)},
        )
        self._processes.append(engine)
        return engine

    def _start_worker(self, name: str) -> Worker:
        directory = self._directory / name
        directory.mkdir(exist_ok=True)
        engine = self._start("worker", directory)
        engine.send(SetFence(EPOCH, TERM))
        load = LoadShard(1, str(self._model.manifest_path), str(self._model.source_path), ALL.encode(), 1)
        engine.send(load)
        engine.wait(ShardLoaded)
        engine.send(Listen("127.0.0.1", 0))
        return Worker(engine, engine.wait(Listening).port, directory)

    def close(self) -> None:
        """End every process."""
        for each in self._processes:
            each.close()

    # -- connections -------------------------------------------------------------------------------

    def _connect_all(self, parts: tuple[Part, ...]) -> None:
        """Let these and nobody else be the holders."""
        engines = {name: worker.engine for name, worker in self._workers.items()}
        write_reply_floor(self._floors, {engines[each.name].node_id: each.reply_floor_ns for each in parts})
        for engine in engines.values():
            self._backbone.send(RemoveHolder(engine.node_id, "a new cell"))
        for part in parts:
            worker = self._workers[part.name]
            part.script.write(worker.directory)
            token = self._expect(worker, self._backbone.certificate)
            if part.name == "steady":
                self._steady_token = token
            reply = self._dial(worker, worker.engine.node_id, token, shard=part.shard, primary=part.primary)
            assert isinstance(reply, HolderConnected), reply

    def _expect(self, worker: Worker, certificate: bytes, lifetime_ns: int = TOKEN_LIFETIME_NS) -> bytes:
        token = secrets.token_bytes(16)
        worker.engine.send(
            ExpectDialler(token, certificate, "backbone", self._backbone.node_id, boottime_ns() + lifetime_ns)
        )
        worker.engine.wait(DiallerExpected, lambda each: each.token == token)
        return token

    def _dial(
        self,
        worker: Worker,
        node_id: NodeId,
        token: bytes,
        *,
        shard: ShardSet = ALL,
        primary: ShardSet = NOTHING,
        certificate: bytes = b"",
    ) -> HolderConnected | HolderLost:
        self._backbone.send(
            ConnectHolder(
                node_id=node_id,
                host="127.0.0.1",
                port=worker.port,
                token=token,
                certificate=certificate or worker.engine.certificate,
                shard=shard.encode(),
                primary=primary.encode(),
                proof=b"proof",
            )
        )
        reply = self._backbone.wait((HolderConnected, HolderLost), lambda each: each.node_id == node_id)
        assert isinstance(reply, HolderConnected | HolderLost)
        return reply

    def _dial_wrongly(self, fault: Fault) -> str:
        """A newcomer's connection that must not come about; the code with which it was given up."""
        steady, early = self._workers["steady"], self._workers["early"]
        newcomer = node_id_of(secrets.token_bytes(32))
        certificate = b""
        match fault:
            case Fault.WRONG_CERTIFICATE:
                token = self._expect(steady, self._backbone.certificate)
                certificate = early.engine.certificate
            case Fault.WRONG_DIALLER:
                token = self._expect(steady, early.engine.certificate)
            case Fault.EXPIRED_TOKEN:
                token = self._expect(steady, self._backbone.certificate, -1)
            case _:
                token = self._steady_token
        reply = self._dial(steady, newcomer, token, certificate=certificate)
        assert isinstance(reply, HolderLost), "the newcomer was let in"
        return reply.code

    # -- sessions ----------------------------------------------------------------------------------

    def _run_session(self, meanwhile: Callable[[], None] | None = None) -> Outcome:
        backbone = self._backbone
        assert not backbone.unread, backbone.unread
        session = SessionId(secrets.token_bytes(16))
        backbone.send(
            Generate(
                session=session,
                prompt=None,
                token_ids=PROMPT,
                n_tokens=N_TOKENS,
                sampling=SamplingOptions(Sampling(temperature=0.0)),
                deadline_ms=60_000,
            )
        )
        if meanwhile is not None:
            meanwhile()
        tokens: list[int] = []
        lost: list[tuple[NodeId, str]] = []
        while True:
            match backbone.read():
                case TokenEmitted() as token:
                    tokens.append(token.token)
                case SessionOpened():
                    pass
                case HolderLost() as holder:
                    lost.append((holder.node_id, holder.code))
                case SessionEnded() as end:
                    return Outcome(tokens, lost, end)
                case other:
                    raise AssertionError(f"unexpected {other}")

    def run(self, cell: Cell) -> None:
        """Run one cell. Raises `AssertionError` where something is not as documented."""
        parts = topology_of(cell)
        self._note_undisturbed(made_honest(parts))
        self._connect_all(parts)
        meanwhile = (lambda: self._meet_newcomer(cell.fault)) if cell.fault in AT_CONNECTION else None
        started = time.monotonic()
        outcome = self._run_session(meanwhile)
        elapsed_s = time.monotonic() - started
        self._check_moment(cell)
        self._check_outcome(cell, outcome)
        if cell.fault is Fault.SLOW:
            assert elapsed_s >= SLOW_S, elapsed_s
        self._repair(cell)
        self._check_undisturbed(made_honest(parts))

    def _meet_newcomer(self, fault: Fault) -> None:
        """While the backbone waits for the faulty worker."""
        directory = self._workers["faulty"].directory
        wait_until(lambda: Fired.read(directory), lambda: "the moment")
        refused = self._dial_wrongly(fault)
        assert refused == CODES[fault], f"the newcomer was refused as {refused}"
        go_on(directory)

    def _check_moment(self, cell: Cell) -> None:
        """The fault happened, and when it was to happen."""
        script = cell.script
        fired = Fired.read(self._workers["faulty"].directory)
        assert fired is not None, "the fault never happened"
        assert script.layer in (None, fired.layer)
        assert fired.pass_number == (0 if cell.moment in (Moment.PREFILL, Moment.RETRY) else PASS)
        if cell.moment is Moment.RETRY:
            assert Fired.read(self._workers["early"].directory) == Fired(fired.layer, PASS)
        elif cell.fault is Fault.NAN_TWICE:
            assert Fired.read(self._workers["early"].directory) == Fired(fired.layer, 0)

    def _check_outcome(self, cell: Cell, outcome: Outcome) -> None:
        faulty, early = (self._workers[name].engine.node_id for name in ("faulty", "early"))
        code = CODES[cell.fault]
        lost: list[tuple[NodeId, str]] = []
        if code is not None and cell.fault not in AT_CONNECTION:
            lost.append((faulty, code))
        if cell.moment is Moment.RETRY:
            lost = [(early, "closed"), *lost]
        failure = None
        if cell.fault is Fault.NAN_TWICE:
            said = r"expert \d of layer \d gives non-finite values on more than one node"
            failure, lost = ("engine_failed", said), []
        elif cell.fault is Fault.NAN and cell.moment is Moment.ALONE:
            said = rf"expert \d of layer \d gives non-finite values on {faulty}, and no other node .*"
            failure, lost = ("engine_failed", said), []
        elif cell.moment is Moment.ALONE and lost:
            failure = ("no_holder_left", r"no holder is left for layer \d, experts [\d, ]+")
        assert outcome.lost == lost, f"lost {outcome.lost}"
        end = outcome.end
        if failure is None:
            assert end.reason == "length", end
            assert outcome.tokens == self.tokens, "the text is another one"
            assert end.rows_retried > 0 or not lost or cell.fault is Fault.TWICE, "nothing was asked again"
        else:
            assert (end.reason, end.code) == ("failed", failure[0]), end
            assert re.fullmatch(failure[1], end.detail), end.detail
            assert outcome.tokens == self.tokens[: len(outcome.tokens)], "the text is another one"
            n_emitted = 0 if cell.moment is Moment.PREFILL else PASS
            assert len(outcome.tokens) == n_emitted, f"{len(outcome.tokens)} tokens before the end"

    def _repair(self, cell: Cell) -> None:
        """A stopped process goes on; a killed one is started again."""
        faulty = self._workers["faulty"]
        if cell.fault is Fault.STOPPED:
            os.kill(faulty.engine.process.pid, signal.SIGCONT)
        if cell.fault is Fault.KILLED:
            assert faulty.engine.process.wait(10.0) == -signal.SIGKILL
            self._workers["faulty"] = self._start_worker("faulty")

    # -- leaks -------------------------------------------------------------------------------------

    def _note_undisturbed(self, parts: tuple[Part, ...]) -> None:
        """What each process holds when nothing goes wrong with these holders."""
        if parts in self._undisturbed:
            return
        counts: dict[str, Resources] = {}
        for _ in range(2):  # the second time nothing is done for the first time any more
            self._connect_all(parts)
            assert self._run_session().tokens == self.tokens
            counts = self._settled()
        self._undisturbed[parts] = counts

    def _settled(self) -> dict[str, Resources]:
        """What each process holds, once that has stayed the same for a while."""
        counts = self._counts()
        since = time.monotonic()
        while time.monotonic() - since < 0.2:
            time.sleep(0.01)
            now = self._counts()
            if now != counts:
                counts, since = now, time.monotonic()
        return counts

    def _counts(self) -> dict[str, Resources]:
        counts = {name: worker.engine.resources() for name, worker in self._workers.items()}
        return counts | {"backbone": self._backbone.resources()}

    def _check_undisturbed(self, parts: tuple[Part, ...]) -> None:
        """Everything connected again, the same text, and nothing kept."""
        self._connect_all(parts)
        outcome = self._run_session()
        assert outcome.lost == [], f"afterwards lost {outcome.lost}"
        assert outcome.tokens == self.tokens, "afterwards the text is another one"
        wanted = self._undisturbed[parts]
        try:
            wait_until(lambda: self._counts() == wanted, lambda: "the processes hold what they held")
        except AssertionError:
            raise AssertionError(f"leaked: {self._counts()} instead of {wanted}") from None


class CellRunner:
    """Runs cells on one set of processes, and on new ones after a cell that was not as documented."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._model = ModelStore(directory / "models").add(make_qwen3moe(directory / "tiny.gguf", SHAPE))
        self._matrix: FailureMatrix | None = None

    def run(self, cell: Cell) -> None:
        """Raises `AssertionError` where something is not as documented."""
        if self._matrix is None:
            self._matrix = FailureMatrix(self._model, Path(tempfile.mkdtemp(dir=self._directory)))
        try:
            self._matrix.run(cell)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        if self._matrix is not None:
            self._matrix.close()
            self._matrix = None


def main() -> int:
    """Run every cell and print the table; 1 when one is not as documented."""
    started = time.monotonic()
    failures: list[str] = []
    first = max(len(fault.value) for fault in Fault)
    columns = [max(len(moment.value), len("FAILED")) for moment in Moment]
    _write(" " * first, *(moment.value.rjust(width) for moment, width in zip(Moment, columns, strict=True)))
    with tempfile.TemporaryDirectory(prefix="kvasir-failures-") as directory:
        runner = CellRunner(Path(directory))
        try:
            for fault in Fault:
                words = []
                for moment, width in zip(Moment, columns, strict=True):
                    cell = Cell(fault, moment)
                    try:
                        runner.run(cell)
                        words.append("ok".rjust(width))
                    except AssertionError as error:
                        words.append("FAILED".rjust(width))
                        failures.append(f"{cell.name}: {error}")
                _write(fault.value.ljust(first), *words)
        finally:
            runner.close()
    for each in failures:
        _write(f"\n{each}")
    count = len(CELLS) - len(failures)
    _write(f"\n{count} of {len(CELLS)} cells as documented, {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


def _write(*words: str) -> None:
    sys.stdout.write("  ".join(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
