"""What is fuzzed: functions from arbitrary bytes to nothing, which raise only when something is wrong.

A target runs the code that meets a stranger's bytes and swallows the errors that code promises. Every other
exception is a finding, and so is a promise that does not hold: what was decoded encodes to the same bytes, a
reply has the right rows, a refusal is one short sentence. Nothing here knows the fuzzer; the same functions
run over seeds and past findings in the ordinary tests.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from kvasir_node.backbone.dispatcher import Dispatcher, LocalHolder
from kvasir_node.backbone.holder import IndexBuffer, RemoteHolder, Request
from kvasir_node.engine.certificate import EngineKey, verify_engine_certificate
from kvasir_node.gateway.refusal import Refusal
from kvasir_node.gateway.text_requests import chat_request_of, completion_request_of
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.gguf_writer import lay_out
from kvasir_node.model.model_bytes import ModelBytes
from kvasir_node.model.model_manifest import manifest_of
from kvasir_node.native_library import load
from kvasir_node.worker.connection import BackboneConnection, ServingCounters
from kvasir_proto import codec, dispatch
from kvasir_proto.audit.evidence import ROW_EVIDENCE, rows_shown
from kvasir_proto.capability import seal_record
from kvasir_proto.certificate import bind_engine
from kvasir_proto.dispatch import FrameKind, Opening, ReplyCode, ReplyHeader, WireType
from kvasir_proto.effects import Now, Send
from kvasir_proto.errors import KvasirError, ModelUnusable, RemoteProtocolError
from kvasir_proto.framing import FrameReader, frame
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of
from kvasir_proto.instants import Instant, WallTime, seconds
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.messages.core import CORE
from kvasir_proto.messages.election import Knowledge
from kvasir_proto.node_core import LAN, NodeCore
from kvasir_proto.program import decode_program
from kvasir_proto.signing import open_signed, sign_message
from kvasir_proto.term_proof import (
    ProvenTerm,
    cast_vote,
    founding_electorate,
    make_term_proof,
    verify_term_proof,
)
from tests.node.gateway.toy_swarm import ToyGateway
from tests.node.sealed_rows import SealingWorker
from tests.node.test_ggml_cpu import EVERYTHING as ALL_OPERATIONS
from tests.node.test_ggml_cpu import ODD_SHAPES, SWIGLU, make_bench
from tests.node.test_rows import pack
from tests.node.toy_experts import (
    EVERYTHING,
    LAYERS,
    N_EXPERT,
    OTHER_PROGRAM,
    PROGRAM,
    WIDTH,
    Rows,
    ToyCall,
    ToyKernel,
    compute_rows,
    shard_of,
    toy_manifest,
)
from tests.proto.declared import FAMILIES, example_of
from tests.proto.small_swarm import MODEL, WALL, capability, found, key_of
from tests.proto.test_program import MERGED

PROGRAMS: Final = (SWIGLU, ALL_OPERATIONS, MERGED)
"""Two that the kernel's made-up layers can run, and one that does not fit them."""

REFUSAL_LENGTH_MAX: Final = 400
"""What is said to somebody else quotes at most a few characters of what was received."""
SENTENCE_LENGTH_MAX: Final = 2400
"""What is said about a file may quote a key of its metadata, which has up to 1024 characters, and a path."""


class Finding(AssertionError):
    """A promise that did not hold."""


@dataclass(frozen=True)
class Target:
    """One thing to fuzz. `seeds` gives inputs that get far; `size_bytes_max` bounds an input."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    size_bytes_max: int = 4096
    document_offset: int = -1
    """Where in an input a msgpack document begins; -1: inputs are not msgpack."""
    is_native: bool = False
    """Whether it is about native code, which then runs with sanitizers."""


def require(condition: bool, what: str) -> None:
    """Raise a `Finding`; unlike an assert, also under `python -O`."""
    if not condition:
        raise Finding(what)


def require_sentence(error: Exception) -> None:
    """What is shown to people is one line of bounded length."""
    text = str(error)
    limit = REFUSAL_LENGTH_MAX if isinstance(error, RemoteProtocolError) else SENTENCE_LENGTH_MAX
    require(0 < len(text) <= limit, f"a refusal of {len(text)} characters")
    require(text.isprintable(), "a refusal that cannot be printed")


# --- files --------------------------------------------------------------------------------------------------


class _MemoryFile:
    """A file in memory with a path: the reader wants one, and a disk would be the slowest part."""

    def __init__(self) -> None:
        self._handle = os.memfd_create("fuzz")
        self.path = Path(f"/proc/self/fd/{self._handle}")

    def write(self, data: bytes, size_bytes: int | None = None) -> Path:
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, data, 0)
        os.ftruncate(self._handle, len(data) if size_bytes is None else size_bytes)
        return self.path


_source, _written = _MemoryFile(), _MemoryFile()


def run_gguf(data: bytes) -> None:
    """A model file: header, geometry, manifest; a header written from it reads the same."""
    try:
        gguf = read_gguf(_source.write(data))
    except ModelUnusable as error:
        require_sentence(error)
        return
    header, placed, size_bytes = lay_out(
        tuple(gguf.metadata.values()), [(t.name, t.type, t.shape) for t in gguf.tensors], gguf.alignment
    )
    again = read_gguf(_written.write(header, size_bytes))
    require(again.tensors == placed, "the tensors of a file written again are others")
    require(dict(again.metadata) == dict(gguf.metadata), "the metadata of a file written again are others")
    try:
        manifest = manifest_of(gguf)
    except ModelUnusable as error:
        require_sentence(error)
        return
    require(ModelManifest.decode(manifest.encode()) == manifest, "a manifest that does not come back")


@cache
def _directory_of_parts() -> Path:
    """A directory for the two parts of a split model, removed at the end of the process."""
    directory = tempfile.TemporaryDirectory(prefix="kvasir-fuzz-")
    atexit.register(directory.cleanup)
    return Path(directory.name)


def run_gguf_parts(data: bytes) -> None:
    """A model in two files: the first two bytes tell where the second begins."""
    cut = 2 + int.from_bytes(data[:2], "little")
    paths = [_directory_of_parts() / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for path, part in zip(paths, (data[2:cut], data[cut:]), strict=True):
        path.write_bytes(part)
    try:
        gguf = read_gguf(paths[0])
        with ModelBytes(paths[0], gguf.size_bytes) as model:
            for tensor in gguf.tensors:
                require(
                    len(model.read(tensor.offset, tensor.size_bytes)) == tensor.size_bytes, "half a tensor"
                )
    except ModelUnusable as error:
        require_sentence(error)
        return
    require(not any(key.startswith("split.") for key in gguf.metadata), "a key about parts was carried on")


def gguf_parts_seeds() -> Iterable[bytes]:
    """Two parts that fit, a first part without tensors, and a file that is whole."""
    from tests.node.model.test_gguf_reader import container, tensor
    from tests.node.model.test_gguf_split import split_entries, two_parts

    parts = two_parts()
    empty = container(entries=split_entries(0, 2, 1), tensors=(), data=0)
    for first, second in ((parts[1], parts[2]), (empty, parts[2]), (container(tensors=(tensor(),)), b"")):
        yield len(first).to_bytes(2, "little") + first + second


def gguf_seeds() -> Iterable[bytes]:
    """Tiny models of several architectures and types, and one with every kind of metadata value."""
    from tests.model_makers import MAKERS, ModelShape
    from tests.node.model.test_gguf_reader import container, entry, tensor, text

    shape = ModelShape(n_layer=1, n_embd=8, n_ff=4, n_expert=2, n_vocab=4, n_head=2, n_head_kv=1, head_size=4)
    with tempfile.TemporaryDirectory() as directory:
        for maker in ("qwen3moe", "qwen3moe-scales", "gpt-oss", "grok"):
            yield MAKERS[maker](Path(directory) / maker, shape).read_bytes()
    values = [struct.pack("<B", 1), *(bytes(size) for size in (1, 2, 2, 4, 4, 4))]
    entries = [entry(b"k%d" % kind, kind, value) for kind, value in enumerate(values)]
    entries += [entry(b"bool", 7, b"\1"), entry(b"text", 8, text(b"value")), entry(b"f64", 12, bytes(8))]
    entries += [entry(b"texts", 9, struct.pack("<IQ", 8, 2) + text(b"a") + text(b""))]
    entries += [entry(b"numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3))]
    yield container(entries=tuple(entries))
    alignment = entry(b"general.alignment", 4, struct.pack("<I", 8))
    yield container(
        entries=(alignment,), tensors=(tensor(b"a", (32,), 8), tensor(b"b", (8,), 0, 40)), data=72
    )
    yield container(version=3 << 24)


def run_manifest(data: bytes) -> None:
    """A manifest or a shard set, by the first byte: canonical, or refused."""
    kind: type[ModelManifest | ShardSet] = ModelManifest if data[:1] < b"\x80" else ShardSet
    try:
        value = kind.decode(data[1:])
    except RemoteProtocolError as error:
        require_sentence(error)
        return
    require(value.encode() == data[1:], "another encoding of the same value was accepted")
    if isinstance(value, ShardSet):
        require(ShardSet.from_ranges(value.ranges) == value, "a shard set that is not in its form")


def manifest_seeds() -> Iterable[bytes]:
    """The toy model's manifest, and shard sets."""
    yield b"\0" + toy_manifest().encode()
    for shard in (ShardSet(), toy_manifest().whole_shard(), ShardSet.from_pairs([(0, 1), (0, 3), (7, 4095)])):
        yield b"\xff" + shard.encode()


# --- messages -----------------------------------------------------------------------------------------------


def run_codec(data: bytes) -> None:
    """A message of the family that the first byte picks: what was accepted encodes, and decodes to itself."""
    if not data:
        return
    family = FAMILIES[data[0] % len(FAMILIES)]
    try:
        message = codec.decode(data[1:], family)
    except RemoteProtocolError as error:
        require_sentence(error)
        return
    require(codec.decode(codec.encode(message), family) == message, "a message that does not come back")


def codec_seeds() -> Iterable[bytes]:
    """One example of every message."""
    for index, family in enumerate(FAMILIES):
        for member in family.members:
            yield bytes([index]) + codec.encode(example_of(member))


def run_framing(data: bytes) -> None:
    """A stream in the chunks that its first bytes tell: the frames are those of the whole stream."""
    if len(data) < 4:
        return
    limit, chunk_sizes, stream = 1 + data[0], [1 + each for each in data[1:4]], data[4:]
    expected, error_expected = _frames_of(stream, limit)
    reader = FrameReader(limit)
    found: list[bytes] = []
    failed = False
    position = turn = 0
    try:
        while position < len(stream):
            chunk = stream[position : position + chunk_sizes[turn % 3]]
            found.extend(reader.feed(chunk))
            position += len(chunk)
            turn += 1
        reader.finish()
    except RemoteProtocolError as error:
        require_sentence(error)
        failed = True
    require(found == expected, "other frames than in the stream")
    require(failed == error_expected, "a broken stream that ends well, or the reverse")


def _frames_of(stream: bytes, limit: int) -> tuple[list[bytes], bool]:
    """The bodies in a whole stream, and whether something else is in it, by another way of reading."""
    bodies: list[bytes] = []
    while len(stream) >= 4:
        (size,) = struct.unpack(">I", stream[:4])
        if size > limit:
            return bodies, True
        if len(stream) < 4 + size:
            break
        bodies.append(stream[4 : 4 + size])
        stream = stream[4 + size :]
    return bodies, bool(stream)


def framing_seeds() -> Iterable[bytes]:
    """Streams of a few frames."""
    for limit, sizes in ((255, (0, 1, 200)), (10, (10, 11)), (1, (0, 0, 0, 1))):
        yield bytes([limit - 1, 0, 6, 255]) + b"".join(frame(bytes(size), 255) for size in sizes)


_SWARM: Final = SwarmDigest(bytes(32))
_FOUNDER_KEY: Final = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_FOUNDER: Final = _FOUNDER_KEY.public_key().public_bytes_raw()


def run_signed(data: bytes) -> None:
    """Whatever is signed: a message by somebody, a term proof, an engine's certificate."""
    if not data:
        return
    kind, body = data[0] % 3, data[1:]
    try:
        if kind == 0:
            open_signed(body, FAMILIES[data[0] // 3 % len(FAMILIES)], _SWARM)
        elif kind == 1:
            verify_term_proof(body, _SWARM, founding_electorate(_FOUNDER))
        else:
            verify_engine_certificate(body, _SWARM, node_id_of(_FOUNDER), "worker")
    except RemoteProtocolError as error:
        require_sentence(error)


def signed_seeds() -> Iterable[bytes]:
    """One signed message of every family, the founder's own proof, and a certificate with its binding."""
    for index, family in enumerate(FAMILIES):
        message = example_of(family.members[0])
        yield bytes([3 * index]) + sign_message(_FOUNDER_KEY, _SWARM, message)
    electorate = founding_electorate(_FOUNDER)
    term = ProvenTerm(0, 1, node_id_of(_FOUNDER))
    vote = cast_vote(_FOUNDER_KEY, _SWARM, electorate, term)
    yield b"\1" + make_term_proof(electorate, term, [vote])
    engine = EngineKey.generate()
    binding = bind_engine(_FOUNDER_KEY, _SWARM, engine.public_der, "worker", 1)
    yield b"\2" + engine.certificate(binding).public_bytes(Encoding.DER)


# --- the swarm core -----------------------------------------------------------------------------------------


def run_node_core(data: bytes) -> None:
    """What three nodes and gossip say to a founder's core: it answers within bounds and always goes on."""
    script = _Script(data)
    swarm = found(_FOUNDER_KEY)
    senders = [node_id_of(key_of(number).public_key().public_bytes_raw()) for number in (2, 3, 4)]
    now = Now(Instant(seconds(1000)), WallTime(WALL))
    core = NodeCore(
        private_key=_FOUNDER_KEY,
        swarm=swarm,
        capability=capability(node_id_of(_FOUNDER)),
        model=MODEL,
        options=LAN,
        stored={},
        entropy=random.Random(0),
        now=now,
    )
    for _ in range(8):
        choice, size = script.byte(), script.byte() << 8 | script.byte()
        body, sender = script.take(size), senders[choice % 3]
        now = Now(Instant(now.instant + 10_000_000 * (choice >> 4) ** 3), now.wall)
        try:
            if choice & 12 == 4:
                core.receive_published("records", body, sender, now)
            elif choice & 12 == 8:
                core.receive_published("terms", body, sender, now)
            elif choice & 12 == 12:
                core.receive_record(body, now)
            else:
                core.receive(codec.decode(body, CORE), sender, now)
        except RemoteProtocolError as error:
            require_sentence(error)
        deadline = core.next_deadline()
        if deadline is not None and deadline <= now.instant:
            core.tick(now)
        effects = core.drain()
        require(len(effects) < 512, f"{len(effects)} effects of one message")
        for effect in effects:
            if isinstance(effect, Send):
                codec.encode(effect.message)
    view = core.view()
    require(
        view.fence is None or view.fence.backbone == core.node_id, "somebody became backbone without votes"
    )


def node_core_seeds() -> Iterable[bytes]:
    """One message of every kind by somebody, alone and after some time; what is signed, by gossip."""
    swarm = found(_FOUNDER_KEY)
    for member in CORE.members:
        body = codec.encode(example_of(member))
        yield bytes([0, len(body) >> 8, len(body) & 255]) + body
        yield bytes([0xF1, 0, 0, 1, len(body) >> 8, len(body) & 255]) + body
    stranger = key_of(2)
    record = capability(node_id_of(stranger.public_key().public_bytes_raw()), sequence=WALL, expires=WALL)
    body = seal_record(stranger, swarm.digest, record)
    yield bytes([4, len(body) >> 8, len(body) & 255]) + body
    announcement = codec.encode(Knowledge((), b"", (), ()))
    yield bytes([8, len(announcement) >> 8, len(announcement) & 255]) + announcement


# --- the data plane -----------------------------------------------------------------------------------------


def run_program(data: bytes) -> None:
    """An expert program: canonical, and judged against shapes without surprises."""
    try:
        program = decode_program(data)
    except RemoteProtocolError as error:
        require_sentence(error)
        return
    require(program.encode() == data, "another encoding of the same program was accepted")
    require(len(program.flat()) == 32 * len(program.steps), "the flat form has another size")
    with contextlib.suppress(RemoteProtocolError):
        program.row_widths(ODD_SHAPES.get)


def program_seeds() -> Iterable[bytes]:
    """Programs that llama.cpp's graphs become."""
    yield from (program.encode() for program in PROGRAMS)
    yield from (PROGRAM.encode(), OTHER_PROGRAM.encode())


def run_evidence(data: bytes) -> None:
    """Evidence whose signatures all hold, since whoever gave the rows may be the liar: whole rows or none."""
    try:
        evidence = codec.decode(data, ROW_EVIDENCE)
        shown = rows_shown(evidence)
    except RemoteProtocolError as error:
        require_sentence(error)
        return
    require(len(shown) == sum(len(each.pairs) for each in evidence.exhibits), "a row is missing")
    for row in shown:
        require(bool(row.x) and bool(row.answer) and not len(row.answer) % 4, "half a row")
        require(row.expert >= 0, "an expert below 0")
        answers = [exhibit.rows for exhibit in evidence.exhibits]
        require(any(row.answer in each for each in answers), "an answer that nobody gave")


def evidence_seeds() -> Iterable[bytes]:
    """Two exchanges of one worker, of which three rows are shown."""
    worker = SealingWorker(key_of(7), _SWARM, PROGRAM)
    for token in range(3):
        worker.answer(1, [2, 5], [[float(token), 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]])
    yield codec.encode(worker.evidence({0: [0, 1], 2: [1]}))


def run_dispatch_header(data: bytes) -> None:
    """A header, or the payload of an OPEN when it is too short for one."""
    if len(data) < dispatch.HEADER_BYTES:
        try:
            opening = Opening.decode(data)
        except RemoteProtocolError as error:
            require_sentence(error)
            return
        require(Opening.decode(opening.encode()) == opening, "an opening that does not come back")
        return
    dispatch.request_id_of(data)
    try:
        header = dispatch.parse_header(data)
    except RemoteProtocolError as error:
        require_sentence(error)
        return
    require(0 <= header.payload_bytes <= dispatch.PAYLOAD_BYTES_MAX, "a payload without a bound")
    require(header.request_id == dispatch.request_id_of(data), "two readings of the request's id")
    if not isinstance(header, dispatch.PlainHeader):
        require(0 <= header.n_pairs <= dispatch.PAIRS_MAX, "a number of pairs without a bound")


def dispatch_header_seeds() -> Iterable[bytes]:
    """A header of every kind, and an opening."""
    yield _OPENING.encode()
    yield from (_OPEN_FRAME[: dispatch.HEADER_BYTES], _PROGRAM_FRAME[: dispatch.HEADER_BYTES])
    yield _dispatch_frame(1, LAYERS[0], 0, 2, [0, 0, 1], [0, 3, 5])[: dispatch.HEADER_BYTES]
    yield _reply_frame(7, 3, bytes(44))[: dispatch.HEADER_BYTES]
    yield dispatch.pack_refusal(7, ReplyCode.STALE_TERM, "another term")[: dispatch.HEADER_BYTES]


_OPENING: Final = Opening(0, 1, b"proof", bytes(32))
_OPEN_FRAME: Final = dispatch.pack_plain(FrameKind.OPEN, 1, _OPENING.encode())
_PROGRAM_FRAME: Final = dispatch.pack_plain(FrameKind.PROGRAM, 2, PROGRAM.encode())


def _dispatch_frame(
    request: int,
    layer: int,
    program: int,
    n_rows: int,
    rows: list[int],
    experts: list[int],
    *,
    width: int = WIDTH,
    wire_type: WireType = WireType.F32,
) -> bytes:
    """A frame whose header fits its payload; whether the indices make sense is another matter."""
    header = bytearray(dispatch.HEADER_BYTES)
    payload_bytes = dispatch.pack_dispatch_into(
        header,
        request_id=request,
        epoch=0,
        term=1,
        layer=layer & 0xFFFFFFFF,
        program=program,
        n_rows=n_rows,
        n_pairs=len(rows),
        n_embd_in=width,
        wire_type=wire_type,
    )
    tables = np.array([rows, experts], np.int32).tobytes()
    values = np.arange(n_rows * width, dtype=np.float32).tobytes()
    return bytes(header) + tables + values[: payload_bytes - len(tables)]


def _reply_frame(request: int, n_pairs: int, rows: bytes) -> bytes:
    frame_bytes = bytearray(dispatch.HEADER_BYTES)
    dispatch.pack_reply_into(
        frame_bytes,
        request_id=request,
        code=ReplyCode.OK,
        payload_bytes=len(rows),
        n_pairs=n_pairs,
        received_ns=1,
        compute_ns=1,
    )
    return bytes(frame_bytes) + rows


class _Script:
    """Numbers out of an input, one after another; zeros when it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def is_over(self) -> bool:
        return self._position >= len(self._data)

    def byte(self) -> int:
        value = self._data[self._position] if not self.is_over else 0
        self._position += 1
        return value

    def index(self) -> int:
        """A small number most of the time, now and then any of 32 bits."""
        value = self.byte()
        if value < 0xF8:
            return value & 7
        return int.from_bytes(self.take(4).ljust(4, b"\0"), "little", signed=True)

    def take(self, count: int) -> bytes:
        begin, self._position = self._position, self._position + count
        return self._data[begin : self._position]


_FRAMES_MAX: Final = 24
_WIDE: Final = 2 * dispatch.Q8_0_BLOCK
"""A width of rows that may also travel in blocks."""


def _stream_of(script: _Script, width: int) -> bytes:
    """What a backbone sends: frames that are good, frames with wrong numbers, damaged ones, and noise."""
    frames: list[bytes] = []
    while not script.is_over and len(frames) < _FRAMES_MAX:
        move = script.byte()
        if move & 7 == 0:
            one = _OPEN_FRAME
        elif move & 7 == 1:
            one = dispatch.pack_plain(
                FrameKind.PROGRAM, 2, OTHER_PROGRAM.encode(), program=script.byte() & 63
            )
        elif move & 7 == 2:
            one = _PROGRAM_FRAME
        elif move & 7 == 3:
            kind = FrameKind.OPEN if script.byte() & 1 else FrameKind.PROGRAM
            one = dispatch.pack_plain(kind, 3, script.take(script.byte()))
        elif move & 7 == 4:
            one = script.take(script.byte())
        else:
            n_rows, n_pairs = 1 + (script.byte() & 7), 1 + (script.byte() & 7)
            one = _dispatch_frame(
                script.byte(),
                script.index(),
                script.byte() & 1,
                min(n_rows, n_pairs),
                [script.index() for _ in range(n_pairs)],
                [script.index() for _ in range(n_pairs)],
                width=width,
                wire_type=WireType.Q8_0 if move & 0x08 and width == _WIDE else WireType.F32,
            )
        if move & 0x80:  # a few bytes of it are changed
            damaged = bytearray(one)
            for _ in range(1 + (move >> 4 & 3)):
                if damaged:
                    damaged[(script.byte() | script.byte() << 8) % len(damaged)] = script.byte()
            one = bytes(damaged)
        if move & 0x40:
            one = one[: script.byte()]
        frames.append(one)
    return b"".join(frames)


def run_worker_connection(data: bytes) -> None:
    """A worker's end of a connection on which anything arrives: replies in order, right rows or refusals."""
    script = _Script(data)
    width = _WIDE if script.byte() & 1 else WIDTH
    kernel = ToyKernel(width=width)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(_stream_of(script, width))
        ours.shutdown(socket.SHUT_WR)
        connection = BackboneConnection(
            theirs,
            kernel,
            threading.Lock(),
            lambda opening: None,
            lambda: (0, 1),
            ServingCounters(),
            lambda n_replies, link, programs: bytes(dispatch.SEAL_BYTES),
        )
        reason = connection.serve(threading.Event())
        theirs.shutdown(socket.SHUT_WR)
        replies = bytearray()
        while part := ours.recv(65536):
            replies += part
    require(0 < len(reason) <= SENTENCE_LENGTH_MAX, "the end has no reason")
    answered = iter(kernel.asked)
    while replies:
        header = dispatch.parse_header(replies)
        if not isinstance(header, ReplyHeader):
            raise Finding("a worker sent something else than a reply")
        end = dispatch.HEADER_BYTES + header.payload_bytes
        require(len(replies) >= end, "half a reply")
        if header.code is ReplyCode.OK and header.n_pairs:
            layer, rows, experts = next(answered)
            expected = compute_rows(layer, rows, np.arange(len(rows), dtype=np.int32), experts)
            rows_end = end - dispatch.DIGEST_BYTES
            require(bytes(replies[dispatch.HEADER_BYTES : rows_end]) == expected.tobytes(), "wrong rows")
        del replies[:end]
    require(next(answered, None) is None, "rows were computed and not sent")


def stream_seeds() -> Iterable[bytes]:
    """Scripts: a good conversation in each width and wire type, one of every kind of damage."""
    for move in (5, 13):
        yield bytes([1, 0, 2, move, 1, 2, 9, 1, 0, 0, 0, 1, 0, 3, 5])
    yield from (b"\0" + script for script in _narrow_scripts())


def _narrow_scripts() -> Iterable[bytes]:
    yield bytes([0, 2, 1, 1, 5, 1, 2, 9, 1, 0, 0, 0, 1, 0, 3, 5])
    yield bytes([0, 2, 6, 2, 2, 1, 3, 0, 0, 9, 0, 1, 7, 5, 3, 3, 1, 0, 0, 0, 0])
    yield bytes([0, 2, 0x87, 1, 2, 9, 1, 0, 0, 0, 1, 0, 3, 5, 4, 0, 255, 5, 0, 0, 0, 3, 0, 0, 0])
    yield bytes([0, 3, 0, 20]) + PROGRAM.encode()[:20] + bytes([4, 30, 1, 2, 3])
    yield bytes([0, 2, 5, 0, 0, 1, 1, 0, 0xFF, 255, 255, 255, 127, 0xFF, 0, 0, 0, 128])


_HOLDER: Final = NodeId("fuzzed")


def run_remote_holder(data: bytes) -> None:
    """A backbone's end of a connection on which anything arrives, for a few requests that wait."""
    script = _Script(data)
    asked = [1 + (script.byte() & 3) for _ in range(1 + (script.byte() & 3))]
    answers = []
    for index, n_pairs in enumerate(asked):
        move = script.byte()
        rows = bytes(dispatch.reply_payload_bytes(n_pairs, WIDTH) if move & 15 else move)
        one = _reply_frame(index if move & 0x30 else script.byte(), n_pairs, rows)
        if move & 0x40:
            one = dispatch.pack_refusal(index, ReplyCode.FOREIGN_EXPERT, "no")
        if move & 0x80:
            damaged = bytearray(one)
            for _ in range(1 + (script.byte() & 3)):
                damaged[script.byte() % len(damaged)] = script.byte()
            one = bytes(damaged[: script.byte() or None])
        answers.append(one)
    stream = b"".join(answers) + script.take(512)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        holder = RemoteHolder(_HOLDER, cast(Any, theirs))
        pairs = IndexBuffer(np.zeros(8, np.int32))
        for index, n_pairs in enumerate(asked):
            holder.submit(
                Request(index, memoryview(b"request"), pairs, 0, n_pairs, n_pairs, WIDTH, 0, 1 << 62)
            )
        holder.send_pending()
        ours.sendall(stream)
        ours.shutdown(socket.SHUT_WR)
        _receive_all(holder, asked)


def _receive_all(holder: RemoteHolder, asked: list[int]) -> None:
    """Take replies until the connection is of no use, as a dispatcher does; `asked` are the pairs of each."""
    answered = 0
    while True:
        try:
            request = holder.receive_reply()
        except RemoteProtocolError as error:
            text = str(error)  # a refusal's own words may be anything
            require(len(text) <= dispatch.REFUSAL_TEXT_BYTES_MAX, "a refusal that is too long")
            if not error.code.startswith("refused_"):
                return
            request = holder.outstanding.popleft()
        except OSError:
            return
        require(request is not None, "nothing came of a stream that had ended")
        require(answered < len(asked), "more replies than requests")
        require(request is not None and request.request_id == answered, "replies out of order")
        require(request is not None and request.n_pairs == asked[answered], "rows for other pairs")
        answered += 1


def remote_holder_seeds() -> Iterable[bytes]:
    """Good replies, a refusal, damage, more than was asked for."""
    yield bytes([1, 2, 3, 0x11, 0x11])
    yield bytes([3, 0, 1, 2, 3, 0x51, 0x11, 0x50, 0x11])
    yield bytes([0, 1, 0x91, 1, 4, 9, 40, 7, 0]) + bytes(90)
    yield bytes([0, 3, 0x10])


def run_dispatcher(data: bytes) -> None:
    """A whole layer call over a worker that answers with anything; with or without another holder."""
    script = _Script(data)
    is_backed = bool(script.byte() & 1)
    n_tokens = 1 + (script.byte() & 3)
    ids = [[script.byte() % N_EXPERT for _ in range(2)] for _ in range(n_tokens)]
    primary = shard_of(*range(1 + script.byte() % N_EXPERT))
    ours, theirs = socket.socketpair()
    dispatcher = Dispatcher(
        load(), toy_manifest(), [PROGRAM], on_holder_lost=lambda *_: None, on_answers_timed=lambda *_: None
    )
    with ours, theirs:
        dispatcher.set_authority(0, 1)
        dispatcher.add_holder(RemoteHolder(_HOLDER, cast(Any, theirs)), EVERYTHING, primary)
        if is_backed:
            local = LocalHolder(node_id_of(bytes(32)), ToyKernel())
            dispatcher.add_holder(local, EVERYTHING, EVERYTHING.difference(primary))
        # Each holder has the id of its dispatch by the time a program is sent.
        ours.sendall(_answers_of(script, program_request=3 if is_backed else 2))
        ours.shutdown(socket.SHUT_WR)
        call = ToyCall(ids)
        try:
            dispatcher(call)
        except KvasirError as error:
            require_sentence(error)
            require(not is_backed, "a call failed although another holder has all experts")
        else:
            require(bool(np.isfinite(call.out).all()), "a row is missing, or was taken as it should not be")
        finally:
            dispatcher.close()


def _answers_of(script: _Script, program_request: int) -> bytes:
    """What a worker sends: good answers to the first requests, refusals, damaged ones, and noise."""
    answers = []
    for request in (program_request, 1, 2, 3)[: 1 + (script.byte() & 3)]:
        move, n_pairs = script.byte(), script.byte() & 15
        rows = script.take(4 * WIDTH * n_pairs) if move & 1 else bytes(4 * WIDTH * n_pairs)
        payload = rows.ljust(dispatch.reply_payload_bytes(n_pairs, WIDTH), b"\0")
        one = _reply_frame(request if move & 6 else script.byte(), n_pairs, payload)
        if move & 0x38 == 0x38:
            one = dispatch.pack_refusal(request, ReplyCode(move & 7), "no")
        if move & 0x80:
            damaged = bytearray(one)
            damaged[script.byte() % len(damaged)] = script.byte()
            one = bytes(damaged[: script.byte() or None])
        answers.append(one)
    return b"".join(answers) + script.take(200)


def dispatcher_seeds() -> Iterable[bytes]:
    """A program taken and rows for one to eight pairs, a refusal, rows that are not finite, silence."""
    for backed in (0, 1):
        for n_pairs in range(1, 9):  # of four tokens' eight pairs the first five experts' go to the worker
            yield bytes([backed, 3, 0, 1, 2, 3, 4, 5, 5, 5, 4, 1, 2, 0, 2, n_pairs])
        yield bytes([backed, 0, 0, 1, 5, 1, 2, 0, 0x3A, 0])
        yield bytes([backed, 0, 0, 1, 5, 1, 2, 0, 3, 2]) + b"\x00\x00\xc0\x7f" * 8
        yield bytes([backed])


# --- native code --------------------------------------------------------------------------------------------
# Arrays are compared by functions here: Atheris 3.0.0 never frees what an operator between two arrays gives.


@cache
def _kernel() -> GgmlCpuKernel:
    """Two layers of seven experts with every kind of tensor, sizes that are a multiple of nothing."""
    return make_bench(ODD_SHAPES).kernel(experts=_HELD)


def run_kernel(data: bytes) -> None:
    """The native kernel on indices that nobody checked: right or refused, never outside a buffer."""
    script = _Script(data)
    kernel = _kernel()
    layer, n_rows, n_pairs = script.index(), 1 + (script.byte() & 7), 1 + (script.byte() & 31)
    rows = np.array([script.index() for _ in range(n_pairs)], np.int32)
    experts = np.array([script.index() for _ in range(n_pairs)], np.int32)
    try:
        number = kernel.add_program(PROGRAMS[script.byte() % len(PROGRAMS)])
        width_in, width_out = kernel.row_widths(layer, number)
    except RemoteProtocolError as error:
        require_sentence(error)
        return
    x = np.frombuffer(script.take(4 * n_rows * width_in).ljust(4 * n_rows * width_in, b"?"), np.float32)
    out = np.full(n_pairs * width_out + 16, _GUARD, np.float32)
    is_sound = n_rows <= n_pairs and all(
        0 <= row < n_rows and expert in _HELD
        for row, expert in zip(rows.tolist(), experts.tolist(), strict=True)
    )
    try:
        kernel.compute(
            layer,
            number,
            n_rows,
            n_pairs,
            x.ctypes.data,
            rows.ctypes.data,
            experts.ctypes.data,
            out.ctypes.data,
        )
    except RemoteProtocolError as error:
        require_sentence(error)
        require(not is_sound, "a sound request was refused")
        require(np.array_equal(out, np.full_like(out, _GUARD)), "a refused request wrote rows")
        return
    require(is_sound, "a foreign expert or row was computed")
    require(out[-16:].tolist() == [float(_GUARD)] * 16, "something was written behind the rows")


_GUARD: Final = np.float32(-777.25)
_HELD: Final = (0, 1, 2, 4, 6)


def kernel_seeds() -> Iterable[bytes]:
    """A sound request of each program, and one of each kind of wrong index."""
    for program in range(len(PROGRAMS)):
        yield bytes([2, 1, 2, 0, 1, 1, 0, 4, 6, program]) + bytes(range(200))
    yield bytes([2, 1, 1, 0, 9, 0, 1, 0])
    yield bytes([0, 0, 0, 0xFF, 255, 255, 255, 255, 0, 0])
    yield bytes([1, 0, 0, 0, 0, 0])


def run_rows(data: bytes) -> None:
    """Packing a layer's call for its holders, and scattering what comes back, against a plain reading."""
    script = _Script(data)
    n_tokens, n_slots, width = 1 + (script.byte() & 7), 1 + (script.byte() & 3), 1 + (script.byte() & 7)
    n_expert, n_holders, per_slot = 1 + (script.byte() & 7), 1 + (script.byte() & 3), bool(script.byte() & 1)
    holders = [script.index() % (n_holders + 1) - 1 for _ in range(n_expert)]
    room = None if script.byte() & 7 else script.byte()
    ids = [script.index() for _ in range(n_tokens * n_slots)]
    packed = pack(ids, holders, n_holders, n_slot=n_slots, width=width, per_slot=per_slot, room=room)
    is_sound = all(0 <= each < n_expert and holders[each] >= 0 for each in ids)
    require((packed.status in (0, 1)) == is_sound, "a foreign id was packed, or a sound one refused")
    if packed.status != 0:
        require(room is not None or not is_sound, "there was room")
        return
    out = np.full((len(ids), width), np.nan, np.float32)
    begin = 0
    for holder, (n_pairs, n_rows, frame_bytes) in enumerate(packed.parts):
        mine = packed.pairs[begin : begin + n_pairs]
        begin += n_pairs
        expected = [pair for pair, each in enumerate(ids) if holders[each] == holder]
        require(mine == expected, "a holder got other pairs than its own")
        if not mine:
            continue
        header = dispatch.parse_header(frame_bytes)
        if not isinstance(header, dispatch.DispatchHeader):
            raise Finding("a frame that is no dispatch")
        require((header.n_pairs, header.n_rows) == (n_pairs, n_rows), "a header that contradicts its frame")
        payload = frame_bytes[dispatch.HEADER_BYTES :]
        tables = np.frombuffer(payload, np.int32, 2 * n_pairs).tolist()
        require(tables[n_pairs:] == [ids[pair] for pair in mine], "other experts than were chosen")
        rows = np.frombuffer(payload, np.float32, n_rows * width, 8 * n_pairs).reshape(n_rows, width)
        answer = rows[tables[:n_pairs]].copy()
        source = [pair if per_slot else pair // n_slots for pair in mine]
        require(answer[:, 0].tolist() == source, "other rows than were chosen")
        _scatter(script, answer, mine, out)


def _scatter(script: _Script, answer: Rows, mine: list[int], out: Rows) -> None:
    """Scatter a holder's rows, of which one may not be finite."""
    bad = script.byte() % (len(mine) + 1)
    if bad < len(mine):
        answer[bad, script.byte() % answer.shape[1]] = (np.nan, np.inf, -np.inf)[script.byte() % 3]
    pairs = np.array(mine, np.int32)
    status = load().scatter_rows(
        answer.ctypes.data, pairs.ctypes.data, len(mine), answer.shape[1], out.ctypes.data
    )
    require(status == (bad if bad < len(mine) else -1), "a row that is not finite went through")
    require(np.array_equal(out[mine[:bad]], answer[:bad]), "rows in other places than their own")
    require(bool(np.isnan(out[mine[bad:]]).all()), "a row was written behind one that is not finite")


def run_sums(data: bytes) -> None:
    """Adding up rows by tables that nobody checked: right or refused, never outside a buffer."""
    script = _Script(data)
    n_pairs, n_rows, width = 1 + (script.byte() & 15), 1 + (script.byte() & 15), 1 + (script.byte() & 7)
    row_of_pair = [script.index() for _ in range(n_pairs)]
    steps = [after - before for before, after in zip([-1, *row_of_pair], row_of_pair, strict=False)]
    is_sound = steps[0] == 1 and all(0 <= step <= 1 for step in steps) and row_of_pair[-1] == n_rows - 1
    rows = np.arange(n_pairs * width, dtype=np.float32).reshape(n_pairs, width)
    table, weights = np.array(row_of_pair, np.int32), np.full(n_pairs, 2.0, np.float32)
    sums = np.full((n_rows + 1, width), _GUARD, np.float32)
    status = load().weighted_sums(
        *(rows.ctypes.data, table.ctypes.data, weights.ctypes.data, n_pairs, n_rows, width),
        sums.ctypes.data,
    )
    require((status == -1) == is_sound, "rows out of order were added up, or sound ones refused")
    expected = np.full_like(sums, _GUARD)
    if is_sound:
        expected[:n_rows] = 0.0
        np.add.at(expected, table, 2.0 * rows)
    require(np.array_equal(sums, expected), "other sums, or something behind them")


def sums_seeds() -> Iterable[bytes]:
    """A sound table, one with a row that has no pair, one that goes far outside."""
    yield bytes([3, 1, 2, 0, 0, 1, 1])
    yield bytes([1, 2, 2, 0, 2])
    yield bytes([1, 0, 2, 0, 0xFF, 255, 255, 255, 127])


def rows_seeds() -> Iterable[bytes]:
    """Sound calls of several shapes, one without room, one for an expert that nobody holds."""
    yield bytes([3, 1, 3, 3, 1, 0, 1, 2, 1, 2, 1, 0, 1, 2, 3, 3, 2, 1, 0, 255, 255])
    yield bytes([7, 3, 0, 7, 3, 1, *[1, 2, 3, 4] * 2, 1, *[each % 8 for each in range(32)], 9, 9, 9, 9])
    yield bytes([1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 2, 0, 0])
    yield bytes([1, 1, 1, 1, 1, 0, 1, 1, 0, 60, 0, 1, 1, 0])
    yield bytes([1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0])


def run_gateway_request(data: bytes) -> None:
    """A body is a request of both endpoints or a refusal of each, which JSON can hold."""
    for parse in (chat_request_of, completion_request_of):
        try:
            parse(data, lambda: 0)
        except Refusal as refusal:
            require(refusal.status in (400, 413), f"status {refusal.status}")
            require(len(refusal.body()) < 8192, "a long refusal")


def run_gateway_connection(data: bytes) -> None:
    """Whatever a client of the gateway sends: the connection ends, in bounded time, and nothing raises."""

    async def converse() -> None:
        toy = ToyGateway()
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(toy.server.serve_connection, theirs)
            await ours.send_all(data)
            await ours.send_eof()
            answered = b"".join([bytes(each) async for each in ours])
        require(toy.server.n_connections == 0, "a connection that never ended")
        require(b" 500 \r\n" not in answered, "a request that crashed")
        require(not answered or answered.startswith(b"HTTP/1.1 "), "an answer that is no HTTP")

    trio.run(converse, clock=trio.testing.MockClock(autojump_threshold=0))


def gateway_request_seeds() -> Iterable[bytes]:
    """A chat and a completion, with most of what they can have."""
    yield (
        b'{"model":"demo","messages":[{"role":"system","content":"a"},{"role":"user","content":'
        b'[{"type":"text","text":"b"}],"name":"n"}],"stop":["x"],"seed":-1,"logit_bias":{"7":1.5},"logprobs":true,'
        b'"top_logprobs":2,"stream":true,"stream_options":{"include_usage":true},"max_tokens":3,"top_p":0.5}'
    )
    yield b'{"model":"demo","prompt":[1,2],"logprobs":1,"temperature":0,"min_p":0.1,"top_k":3,"n":1}'
    yield b'{"model":"demo","prompt":"a","presence_penalty":1,"frequency_penalty":-2,"user":"u"}'


def gateway_connection_seeds() -> Iterable[bytes]:
    """The same requests, one by one and behind each other, and questions without a body."""
    posts = [
        b"POST %b HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body)
        for body in gateway_request_seeds()
        for path in (b"/v1/chat/completions", b"/v1/completions")
    ]
    gets = [
        b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path
        for path in (b"/v1/models", b"/v1/models/demo", b"/health/ready", b"/metrics", b"/v1/embeddings")
    ]
    yield from [*posts, *gets, gets[0] + gets[1]]


TARGETS: Final = {
    target.name: target
    for target in (
        Target("gguf", run_gguf, gguf_seeds, 8192),
        Target("gguf-parts", run_gguf_parts, gguf_parts_seeds, 1024),
        Target("manifest", run_manifest, manifest_seeds, document_offset=1),
        Target("codec", run_codec, codec_seeds, document_offset=1),
        Target("framing", run_framing, framing_seeds, 1024),
        Target("signed", run_signed, signed_seeds, document_offset=1),
        Target("node-core", run_node_core, node_core_seeds, 2048),
        Target("program", run_program, program_seeds, 2048, document_offset=0),
        Target("evidence", run_evidence, evidence_seeds, document_offset=0),
        Target("dispatch-header", run_dispatch_header, dispatch_header_seeds, 128),
        Target("worker-connection", run_worker_connection, stream_seeds, 1024),
        Target("remote-holder", run_remote_holder, remote_holder_seeds, 1024),
        Target("dispatcher", run_dispatcher, dispatcher_seeds, 1024),
        Target("kernel", run_kernel, kernel_seeds, 1024, is_native=True),
        Target("rows", run_rows, rows_seeds, 256, is_native=True),
        Target("gateway-request", run_gateway_request, gateway_request_seeds),
        Target("gateway-connection", run_gateway_connection, gateway_connection_seeds),
        Target("sums", run_sums, sums_seeds, 256, is_native=True),
    )
}
"""Every target by its name."""
