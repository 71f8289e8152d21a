"""Kernel hosts: every fault of a child ends in an `EngineFailed` in time; real hosts compute as ggml does.

Faults are shown by small programs in the place of a host. Real hosts are those that `make backends` built.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from kvasir_node.certification.crafted_weights import random_rows
from kvasir_node.certification.processor_rounding import processor_of, rows_near_ties
from kvasir_node.certification.synthetic_model import ExpertShape, SyntheticExperts
from kvasir_node.kernels import kernel_host
from kvasir_node.kernels.activation_formats import ROUNDINGS_OF_PROCESSOR, processors_of
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.ggml_hosted import GgmlHostedKernel
from kvasir_node.kernels.host_builds import (
    HOST_BUILDS,
    HOSTS_DIRECTORY,
    RECORD_SUFFIX,
    built_hosts,
    host_command,
)
from kvasir_node.kernels.kernel_host import (
    CALL_FLOOR_S,
    CALL_TIMEOUT_S,
    PAYLOAD_BYTES_MAX,
    CallTimes,
    KernelHost,
)
from kvasir_node.kernels.liars import LYING_KERNELS
from kvasir_node.native_library import NATIVE_ABI
from kvasir_proto.errors import ConfigurationInvalid, EngineFailed, IncompatibleVersion, RemoteProtocolError
from kvasir_proto.limits import Kernel
from kvasir_proto.manifest import ShardSet
from kvasir_proto.program import ExpertProgram
from tests.node.hosts_here import each_host
from tests.node.kernel_calls import distance
from tests.node.test_ggml_cpu import (
    EVERYTHING,
    N_EXPERT,
    ODD_SHAPES,
    SWIGLU,
    Bench,
    X,
    compute,
    expected_row,
    make_bench,
    matmul,
)
from tests.node.test_reference_kernel import difficult_values

HELLO = struct.pack("<8s2I16s224s", b"KVASIRKH", 1, NATIVE_ABI, b"0.25.3", b"NEON")
NEVER = "import time; time.sleep(600)\n"
SAY = "import sys, os\nsay = lambda data: os.write(1, data)\nhear = lambda n: sys.stdin.buffer.read(n)\n"
"""Beginning of a program in the place of a host."""


def reply(status: int, payload: bytes = b"", magic: bytes = b"KVRP", size: int | None = None) -> bytes:
    return magic + struct.pack("<iQ", status, len(payload) if size is None else size) + payload


def child(program: str, **timeouts: float) -> KernelHost:
    return KernelHost((sys.executable, "-c", SAY + program), **timeouts)


def is_gone(host: KernelHost) -> bool:
    return host._process.returncode is not None


@pytest.fixture(scope="module")
def odd() -> Bench:
    return make_bench(ODD_SHAPES)


# ---- What a child can do wrong -----------------------------------------------------------------------------


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineFailed, match=r"'no-such-emulator' cannot be started: No such file"):
        KernelHost(("no-such-emulator", "host"))


@pytest.mark.parametrize(
    "program, error, reason",
    [
        ("", EngineFailed, "ended with status 0"),
        ("sys.exit(3)", EngineFailed, "ended with status 3"),
        ("os.kill(os.getpid(), 11)", EngineFailed, "ended by SIGSEGV"),
        (f"say({HELLO[:200]!r})", EngineFailed, "ended with status 0"),
        (f"say(b'K' * 256); {NEVER}", EngineFailed, "no hello"),
        (NEVER, EngineFailed, "did not answer in time"),
        (f"say({HELLO[:255]!r}); {NEVER}", EngineFailed, "did not answer in time"),
        (f"say({HELLO[:8] + b'2' + HELLO[9:]!r}); {NEVER}", IncompatibleVersion, "build it again"),
        (f"say({HELLO[:12] + b'2' + HELLO[13:]!r}); {NEVER}", IncompatibleVersion, "build it again"),
    ],
)
def test_a_child_without_a_good_hello_is_no_host(program: str, error: type[Exception], reason: str) -> None:
    silent = program.endswith(NEVER) and error is EngineFailed and "time" in reason
    with pytest.raises(error, match=reason):
        child(program, start_timeout_s=0.5 if silent else 30)


@pytest.mark.parametrize(
    "program, reason",
    [
        ("", "ended with status 0"),
        ("hear(24)", "ended with status 0"),
        ("hear(24); os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        (f"hear(24); os.close(1); {NEVER}", "closed its output"),
        (f"hear(24); {NEVER}", "did not answer in time"),
        (f"hear(24); say({reply(0)[:15]!r}); {NEVER}", "did not answer in time"),
        (f"hear(24); say({reply(0, magic=b'KVRQ')!r}); {NEVER}", "no reply"),
        (f"hear(24); say({reply(0, bytes(4))!r}); {NEVER}", "4 bytes, not 0"),
        (f"hear(24); say({reply(-1, size=1 << 40)!r}); {NEVER}", "reason has 1099511627776 bytes"),
        (f"hear(24); say({reply(-1, size=500)!r}); {NEVER}", "did not answer in time"),
        (f"hear(24); say({reply(-100, b'what?')!r}); {NEVER}", "it understood nothing: what?"),
        # It refuses without reading all, and goes.
        (f"say({reply(-100, b'too long')!r}); sys.exit(2)", "it understood nothing: too long"),
    ],
)
def test_a_child_that_fails_is_given_up_for_good(
    program: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_host, "STOP_TIMEOUT_S", 0.5 if "closed" in reason else 30)
    in_time = "time" in reason
    host = child(f"say({HELLO!r})\n" + program, call_timeout_s=0.3 if in_time else 30)
    assert (host.ggml_version, host.features) == ("0.25.3", "NEON")
    with pytest.raises(EngineFailed, match=reason):
        host.kernel_create(1, 4)
    assert is_gone(host)
    with pytest.raises(EngineFailed, match=reason):  # at once, and for the same reason
        host.kernel_memory_bytes(1)
    host.close()


def test_a_child_that_reads_nothing_does_not_hold_the_caller() -> None:
    host = child(f"say({HELLO!r}); {NEVER}", call_timeout_s=0.3)
    expert = np.zeros(1 << 20, np.uint8)  # more than a pipe takes
    with pytest.raises(EngineFailed, match="did not answer in time"):
        host.kernel_set_expert(1, 0, 0, 0, expert.ctypes.data, expert.nbytes)
    assert is_gone(host)


EXPERT_PRODUCTS = 3 * 3072 * 1024


@pytest.mark.parametrize(
    "before, n_rows, allowed_s",
    [
        ([], 0, CALL_FLOOR_S),
        ([], 1, CALL_FLOOR_S + 1.6),
        ([], 512, CALL_TIMEOUT_S),
        ([(1, 0.002), (8, 0.016)], 512, CALL_FLOOR_S + 8.2),
        ([(8, 0.016), (1, 0.2)], 64, CALL_FLOOR_S + 102.4),
        ([(1, 30.0)], 512, CALL_TIMEOUT_S),
    ],
    ids=["nothing", "a row", "an emulator's most", "a processor's", "the slowest counts", "a slow one's"],
)
def test_a_call_may_take_what_it_asks_for_by_the_hosts_own_speed(
    before: list[tuple[int, float]], n_rows: int, allowed_s: float
) -> None:
    times = CallTimes()
    for n_before, took_s in before:
        times.learn(n_before * EXPERT_PRODUCTS, took_s)
    times.learn(100, 5.0)  # a small one that was slow for other reasons
    assert times.allowed_s(n_rows * EXPERT_PRODUCTS, 0) == pytest.approx(allowed_s, rel=0.02)
    assert CallTimes(7.0).allowed_s(n_rows * EXPERT_PRODUCTS, 0) <= 7.0
    assert times.allowed_s(0, 100_000_000) == pytest.approx(CALL_FLOOR_S + 10)


def test_a_host_that_stands_still_is_given_up_as_soon_as_it_should_have_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not after the ten minutes that an emulator may take for the most that is ever asked."""
    width = 1024
    rows = bytes(4 * width)
    program = f"""
say({HELLO!r})
hear(16 + 16 + 16); say({reply(0)!r})
hear(16 + 8); say({reply(0, struct.pack("<2i", width, width))!r})
hear(16 + 16 + 8 + {len(rows)}); say({reply(0, rows)!r})
os.kill(os.getpid(), 19)
"""
    host = child(program)
    shape = (ctypes.c_int64 * 2)(width, width)
    assert host.kernel_add_tensor(1, 0, 0, 0, shape, 2) == 0
    table, x = np.zeros(1, np.int32), np.zeros(width, np.float32)
    asked = (1, 0, 0, 1, 1, x.ctypes.data, table.ctypes.data, table.ctypes.data, x.ctypes.data)
    assert host.kernel_compute(*asked) == 0
    monkeypatch.setattr(kernel_host, "CALL_FLOOR_S", 0.5)
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="did not answer in time"):
        host.kernel_compute(*asked)
    assert time.monotonic() - began < 60
    assert is_gone(host)


def test_widths_that_cannot_be_are_not_believed() -> None:
    host = child(f"say({HELLO!r}); hear(24); say({reply(0, struct.pack('<2i', 0, 9))!r}); {NEVER}")
    with pytest.raises(EngineFailed, match="rows are 0 and 9 wide"):
        host.kernel_bind(1, 0, 0)
    assert is_gone(host)


def test_a_call_that_was_interrupted_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes then is the answer to another question."""
    host = child(f"say({HELLO!r}); hear(24); {NEVER}")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.kernel_create(1, 4)
    assert is_gone(host)
    with pytest.raises(EngineFailed, match="broken off"):
        host.kernel_create(1, 4)


def test_more_than_the_pipe_takes_is_refused_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_host, "STOP_TIMEOUT_S", 0.2)  # this child does not end by itself
    answer = reply(0, struct.pack("<2i", 1 << 20, 1 << 20))
    host = child(f"say({HELLO!r}); hear(24); say({answer!r}); {NEVER}", call_timeout_s=30)
    assert host.kernel_compute(1, 0, 0, 1, 4096, 0, 0, 0, 0) == -1
    assert "more than a kernel host takes" in host.kernel_error(1)
    with pytest.raises(EngineFailed, match="more than a kernel host takes"):
        host._ask(4, memoryview(bytes(1)).cast("B"), *[memoryview(bytearray(1 << 20))] * 1025)
    assert PAYLOAD_BYTES_MAX < 1025 << 20
    host.close()
    host.close()
    assert is_gone(host)


# ---- What a name stands for --------------------------------------------------------------------------------


def test_names_are_those_of_the_protocol() -> None:
    others = {"ggml-cpu", "opencl", "ggml-device", "emulated-f16"}
    assert set(HOST_BUILDS) == set(get_args(Kernel)) - others - set(LYING_KERNELS)
    script = (Path(__file__).parents[2] / "deploy" / "kernel-hosts").read_text("utf-8")
    assert f"ALL=({' '.join(HOST_BUILDS)})" in script


def built(program: Path, data: bytes) -> None:
    """As `deploy/kernel-hosts` does."""
    program.write_bytes(data)
    program.with_name(f"{program.name}.sha256").write_text(hashlib.sha256(data).hexdigest() + "\n", "ascii")


def test_a_program_of_another_build_under_its_name_is_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a node would certify the one's arithmetic as the other's."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    one, other = tmp_path / "ggml-sse2", tmp_path / "ggml-avx2"
    built(one, b"one")
    built(other, b"other")
    assert host_command("ggml-sse2", tmp_path) == (str(one),)
    record = tmp_path / "ggml-sse2.sha256"
    good = record.read_bytes()
    cases: dict[str, tuple[bytes, bytes | None]] = {
        "another name's": (b"other", good),
        "damaged": (b"onf", good),
        "without a record": (b"one", None),
        "with another's": (b"one", (tmp_path / "ggml-avx2.sha256").read_bytes()),
        "with one that is no digest": (b"one", b"\xff" * 64),
        "with one without end": (b"one", good + bytes(1000)),
    }
    for what, (data, digest) in cases.items():
        one.write_bytes(data)
        record.unlink(missing_ok=True)
        if digest is not None:
            record.write_bytes(digest)
        with pytest.raises(ConfigurationInvalid, match="not what was built under that name"):
            host_command("ggml-sse2", tmp_path)
        assert "not what was built" in built_hosts(tmp_path)["ggml-sse2"], what
    script = (Path(__file__).parents[2] / "deploy" / "kernel-hosts").read_text("utf-8")
    assert f"$name{RECORD_SUFFIX}" in script


def test_what_is_not_built_or_cannot_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: Bench
) -> None:
    with pytest.raises(ConfigurationInvalid, match="not built here: 'make backends'"):
        host_command("ggml-sse2", tmp_path)
    for name in ("ggml-sse2", "ggml-neon-v8.6"):
        built(tmp_path / name, b"")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host_command("ggml-sse2", tmp_path) == (str(tmp_path / "ggml-sse2"),)
    with pytest.raises(ConfigurationInvalid, match="install Debian's qemu-user"):
        host_command("ggml-neon-v8.6", tmp_path)
    emulator = tmp_path / "qemu-aarch64"
    emulator.touch(0o755)
    program = str(tmp_path / "ggml-neon-v8.6")
    assert host_command("ggml-neon-v8.6", tmp_path) == (str(emulator), "-cpu", "max", program)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert host_command("ggml-neon-v8.6", tmp_path) == (program,)
    monkeypatch.setattr("kvasir_node.kernels.choice.host_command", lambda name: host_command(name, tmp_path))
    (tmp_path / "ggml-sse2").unlink()
    with pytest.raises(ConfigurationInvalid, match="not built here"):
        make_kernel("ggml-sse2", odd.manifest, odd.manifest.whole_shard(), odd.read)


# ---- Real hosts --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=each_host())
def name(request: pytest.FixtureRequest) -> Kernel:
    kernel: Kernel = request.param
    return kernel


def hosted(bench: Bench, name: Kernel, experts: range | list[int] = range(N_EXPERT)) -> GgmlHostedKernel:
    shard = ShardSet.from_pairs((layer, expert) for layer in (0, 2) for expert in experts)
    kernel = make_kernel(name, bench.manifest, shard, bench.read, threads=2)
    assert isinstance(kernel, GgmlHostedKernel)
    return kernel


@pytest.fixture(scope="module")
def kernel(odd: Bench, name: Kernel) -> Iterator[GgmlHostedKernel]:
    kernel = hosted(odd, name, [0, 1, 2, 4, 5, 6])
    yield kernel
    kernel.close()


def test_a_host_is_what_its_name_says(kernel: GgmlHostedKernel, name: Kernel) -> None:
    features = kernel.features.split()
    expected = {
        "ggml-neon-v8.0": ({"NEON"}, {"FP16_VA", "DOTPROD", "MATMUL_INT8"}),
        "ggml-neon-v8.6": ({"NEON", "FP16_VA", "DOTPROD", "MATMUL_INT8"}, {"SVE"}),
        "ggml-sse2": (set(), {"SSE3", "SSSE3", "AVX", "FMA", "F16C"}),
        "ggml-avx2": ({"AVX2", "FMA", "F16C"}, {"AVX512", "AVX512_VNNI"}),
    }[name]
    assert expected[0] <= set(features)
    assert expected[1].isdisjoint(features)
    assert kernel.backend == name


@pytest.mark.parametrize("program", [SWIGLU, EVERYTHING], ids=["swiglu", "everything"])
def test_rows_of_a_host_are_what_the_program_means(
    odd: Bench, kernel: GgmlHostedKernel, program: object
) -> None:
    assert program in (SWIGLU, EVERYTHING)
    chosen = SWIGLU if program is SWIGLU else EVERYTHING
    draws = np.random.default_rng(3)
    x = draws.normal(size=(8, 19)).astype(np.float32)
    rows, experts = draws.integers(0, 8, 17), draws.choice([0, 1, 2, 4, 5, 6], 17)
    rows[:8] = range(8)
    out = compute(kernel, kernel.add_program(chosen), x, rows.tolist(), experts.tolist())
    for pair in range(17):
        expected = expected_row(odd, chosen, 2, x[rows[pair]], int(experts[pair]))
        np.testing.assert_allclose(out[pair], expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "layer, program, rows, experts, code",
    [
        (1, 0, [0, 1], [1, 2], "unknown_layer"),
        (2, 7, [0, 1], [1, 2], "unknown_program"),
        (2, 0, [0, 1], [1, 3], "foreign_expert"),
        (2, 0, [0, 2], [1, 2], "row_out_of_range"),
        (2, 0, [0], [1], "shape_invalid"),
        (2, 0, [], [], "shape_invalid"),
    ],
)
def test_a_host_refuses_as_the_native_library_does_and_goes_on(
    odd: Bench,
    kernel: GgmlHostedKernel,
    layer: int,
    program: int,
    rows: list[int],
    experts: list[int],
    code: str,
) -> None:
    number = kernel.add_program(SWIGLU)
    asked = {0: number, 7: 7}[program]
    refusals = []
    inside = odd.kernel([0, 1, 2, 4, 5, 6])
    inside.add_program(SWIGLU)
    for each, index in ((kernel, asked), (inside, program)):
        with pytest.raises(RemoteProtocolError) as raised:
            compute(each, index, X, rows, experts, layer=layer, width_out=21)
        refusals.append((raised.value.code, str(raised.value)))
    assert refusals[0] == refusals[1]
    assert refusals[0][0] == code
    assert np.isfinite(compute(kernel, number, X, [0, 1], [1, 2])).all()
    inside.close()


def test_a_host_holds_its_shard_and_says_why_it_cannot(odd: Bench, name: Kernel) -> None:
    one, many = hosted(odd, name, [2, 5]), odd.kernel([2, 5])
    assert one.memory_bytes == many.memory_bytes
    backwards = (matmul(0, "down"), matmul(1, "down"))
    with pytest.raises(RemoteProtocolError, match="not as wide"):
        one.add_program(type(SWIGLU)(backwards, input_per_slot=False))
    process = one._host._process
    one.close()
    one.close()
    many.close()
    assert process.returncode == 0
    with pytest.raises(EngineFailed, match="8192 threads"):
        make_kernel(name, odd.manifest, ShardSet.from_pairs([(0, 0)]), odd.read, threads=8192)
    with pytest.raises(EngineFailed, match="bytes here, not 3"):
        make_kernel(name, odd.manifest, ShardSet.from_pairs([(0, 0)]), lambda tensor, expert: b"abc")


PROCESSOR_OF = {
    "ggml-neon-v8.0": "NEON",
    "ggml-neon-v8.6": "NEON",
    "ggml-sse2": "plain C",
    "ggml-avx2": "AVX",
}


def test_a_host_rounds_rows_to_q8_0_as_its_processor_does(name: Kernel) -> None:
    """Rows times one: what comes back is what the rows were rounded to, exactly."""
    bench = make_bench({"ffn_up_exps.weight": (256, 256, N_EXPERT)}, "q8_0")
    blocks = np.zeros((256, 8, 34), np.uint8)
    blocks[:, :, :2] = np.array([1], np.float16).view(np.uint8)
    blocks[np.arange(256), np.arange(256) // 32, 2 + np.arange(256) % 32] = 1
    bench.quantised = dict.fromkeys(bench.quantised, blocks.tobytes() * N_EXPERT)
    one = hosted(bench, name)
    rows = np.concatenate([rows_near_ties(256, 32), difficult_values()[:16]])
    product = ExpertProgram((matmul(0, "up"),), input_per_slot=False)
    found = compute(one, one.add_program(product), rows, list(range(len(rows))), [0] * len(rows))
    one.close()
    alike = [
        processor
        for processor, roundings in ROUNDINGS_OF_PROCESSOR.items()
        if np.array_equal(found, roundings["q8_0"](rows))
    ]
    assert alike == [PROCESSOR_OF[name]]


@pytest.mark.parametrize("weight_type, form", [("q8_0", "q8_0"), ("q4_K", "q8_K")])
def test_how_a_host_rounds_is_found(name: Kernel, weight_type: str, form: str) -> None:
    shape = ExpertShape(256, 256)
    gate = random_rows(weight_type, shape.n_ff, shape.n_embd, np.random.default_rng(1))[None]
    experts = SyntheticExperts(shape, weight_type, {"gate": gate})
    one = experts.load(partial(make_kernel, name))
    expected = PROCESSOR_OF[name] if PROCESSOR_OF[name] in processors_of([form]) else "AVX"
    assert [processor_of(one, experts, form, each) for each in (1, 8, 512)] == [expected] * 3
    one.close()


@pytest.mark.parametrize("type_name", ["f32", "q8_0"])
def test_a_host_is_near_ggml_in_this_process(name: Kernel, type_name: str) -> None:
    """Most rows agree to 2e-6; a flip of one hidden value's rounding is all that may part them further."""
    bench = make_bench(dict.fromkeys(SWIGLU.suffixes, (256, 256, N_EXPERT)), type_name)
    one, inside = hosted(bench, name), bench.kernel()
    x = np.random.default_rng(5).normal(size=(64, 256)).astype(np.float32)
    experts = [pair % N_EXPERT for pair in range(64)]
    rows = [compute(each, each.add_program(SWIGLU), x, list(range(64)), experts) for each in (one, inside)]
    apart = np.array([distance(a, b) for a, b in zip(*rows, strict=True)])
    assert np.count_nonzero(apart > 2e-6) <= (0 if type_name == "f32" else 4)
    assert apart.max() < 1e-2
    one.close()
    inside.close()


def test_a_host_that_is_killed_fails_its_calls_and_no_more(odd: Bench, name: Kernel) -> None:
    one = hosted(odd, name)
    number = one.add_program(SWIGLU)
    os.kill(one._host._process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EngineFailed, match="is lost: it was ended by SIGKILL"):
            compute(one, number, X, [0, 1], [1, 2], width_out=21)
    one.close()


def test_a_host_ends_when_its_starter_is_gone(name: Kernel) -> None:
    with subprocess.Popen(host_command(name), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        assert host.stdout.read(256)[:8] == b"KVASIRKH"
        host.stdin.close()
        assert host.wait(30) == 0


@pytest.mark.parametrize(
    "garbage, reason",
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"the input is no request"),
        (bytes(16), b"the input is no request"),
        (b"KVRQ" + struct.pack("<iQ", 99, 0), b"operation 99 is not known"),
        (b"KVRQ" + struct.pack("<iQ", 0, 0), b"operation 0 is not known"),
        (b"KVRQ" + struct.pack("<iQ", 4, (1 << 30) + 1), b"a request of 1073741825 bytes is too large"),
        (b"KVRQ" + struct.pack("<iQ", 4, 1 << 63), b"a request of 9223372036854775808 bytes is too large"),
        (b"KVRQ" + struct.pack("<iQ", 4, 1 << 30) + bytes(99), b"the input ended inside a request"),
        (b"KVRQ" + struct.pack("<i", 4), b"the input ended inside a request"),
    ],
)
def test_a_host_answers_garbage_and_ends(name: Kernel, garbage: bytes, reason: bytes) -> None:
    done = subprocess.run(host_command(name), input=garbage, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout[256:] == reply(-100, reason)


def request(operation: int, *words: int, rest: bytes = b"") -> bytes:
    payload = struct.pack(f"<{len(words)}i", *words) + rest
    return b"KVRQ" + struct.pack("<iQ", operation, len(payload)) + payload


def test_a_host_refuses_every_size_that_does_not_fit(name: Kernel) -> None:
    """Sound requests of senseless content: each is answered, and the one behind it too."""
    senseless = [
        request(operation, *words)
        for operation in range(1, 9)
        for words in (
            (),
            (1,),
            (0, -1),
            (0, 1 << 30),
            (2**31 - 1, -1, 2, -(2**31)),
            (0, 0, 0, 0, 0),
            (7,) * 9,
        )
        if not (operation == 5 and not words) and not (operation == 1 and len(words) == 2)
    ]
    asked = [senseless[1], request(1, 1, 0), request(1, 1, 4), request(1, 1, 4), *senseless, request(5)]
    done = subprocess.run(
        host_command(name), input=b"".join(asked), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0
    statuses, rest = [], done.stdout[256:]
    while rest:
        magic, status, size = struct.unpack("<4siQ", rest[:16])
        assert (magic, size <= 512) == (b"KVRP", True)
        statuses.append(status)
        rest = rest[16 + size :]
    assert len(statuses) == len(asked)
    assert statuses[:4] == [-1, -1, 0, -1]
    assert 0 not in statuses[4:-1]
    assert statuses[-1] == 0


def test_calls_of_two_threads_take_turns(odd: Bench, kernel: GgmlHostedKernel) -> None:
    number = kernel.add_program(SWIGLU)
    expected = compute(kernel, number, X, [0, 1], [1, 2])
    wrong: list[bool] = []

    def ask() -> None:
        wrong.extend((compute(kernel, number, X, [0, 1], [1, 2]) != expected).any() for _ in range(5))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(wrong) == 15
    assert not any(wrong)


def test_hosts_lie_in_the_environment() -> None:
    assert HOSTS_DIRECTORY.is_relative_to(sys.prefix)
