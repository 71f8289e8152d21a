"""`doctor`: can this machine do what a node must, and what to do where it cannot. It changes nothing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import trio

from kvasir_node.bench.machine import cpu_features, cpu_name, memory_bytes
from kvasir_node.cli.output import json_option, print_json, print_table
from kvasir_node.cli.session import CommandSession
from kvasir_node.config import Configuration
from kvasir_node.control import request_status
from kvasir_node.kernels.host_builds import built_hosts
from kvasir_node.locations import Locations
from kvasir_node.model.store import SPARE_BYTES, ModelStore
from kvasir_node.system_words import in_words
from kvasir_proto.errors import DaemonUnreachable, KvasirError, NotRunning
from kvasir_proto.limits import Kernel

if TYPE_CHECKING:
    from kvasir_node.ggml_devices import GgmlDevice
    from kvasir_node.kernels.opencl_devices import OpenClDevice

SCHEMA_VERSION: Final = 1
MEMORY_BYTES_MIN: Final = 1 << 30
"""The demo's swarm and its single process take a good half of this."""

DISK_BYTES_MIN: Final = 256 << 20
_YEAR_OF_RELEASE: Final = 2026
_FAST_FEATURES: Final = {"x86_64": "avx2", "AMD64": "avx2", "aarch64": "asimddp", "arm64": "asimddp"}
"""What ggml's kernels need on each architecture to be several times faster than plain code."""


_SIGNS_OF_HARDWARE: Final = {
    "/dev/nvidiactl": ("an NVIDIA driver", frozenset({"CUDA", "Vulkan"})),
    "/dev/kfd": ("an AMD compute driver", frozenset({"ROCm", "Vulkan"})),
    "/dev/dri/renderD128": ("a graphics driver", frozenset({"CUDA", "ROCm", "SYCL", "Vulkan"})),
}
"""Files that a driver makes, and the ggml backends that could use what it drives."""

_GPU_GUIDE: Final = "docs/how-to/gpu.md"
_OPENCL_GUIDE: Final = "docs/how-to/opencl.md"
_KERNEL_HOSTS_GUIDE: Final = "docs/how-to/kernel-hosts.md"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `remedy` is what to do; empty where there is nothing to do."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check this machine and this home, and say what to do. Exit status 1 when something is wrong."""
    session: CommandSession = ctx.obj
    checks = list(run_checks(session))
    if as_json:
        print_json({"schema_version": SCHEMA_VERSION, "checks": [asdict(check) for check in checks]})
    else:
        print_table(
            ("", "CHECK", "FOUND", "REMEDY"),
            [("ok" if each.ok else "!!", each.name, each.found, each.remedy) for each in checks],
        )
    ctx.exit(0 if all(check.ok for check in checks) else 1)


def run_checks(session: CommandSession) -> Iterator[Check]:
    """Every check, in the order in which a start needs what it looks at; none raises."""
    yield _guarded("python", check_python)
    yield _guarded("native library", _native_library)
    yield _guarded("ggml", _ggml)
    yield _guarded("llama.cpp", _llama_cpp)
    yield _guarded("cpu", lambda: check_cpu(platform.machine(), cpu_features()))
    yield _guarded("memory", lambda: check_memory(memory_bytes("MemAvailable")))
    yield _guarded("tls", _tls)
    yield _guarded("congestion control", _congestion_control)
    yield _guarded("boot clock", _boot_clock)
    yield _guarded("wall clock", lambda: check_wall_clock(time.time()))
    try:
        locations, configuration = session.locations, session.configure()
    except KvasirError as error:
        yield Check("configuration", False, str(error), "mend what the sentence names")
        return
    yield Check("configuration", True, str(locations.config_file))
    yield _guarded("devices", lambda: _devices(configuration.engine_device))
    if configuration.engine_kernel == "ggml-device":
        yield _guarded("experts' device", lambda: _experts_device(configuration.engine_kernel_device))
    yield _guarded("opencl", lambda: _opencl(configuration))
    yield _guarded("kernel hosts", lambda: check_kernel_hosts(configuration.engine_kernel, built_hosts()))
    yield _guarded("home", lambda: check_home(locations))
    yield _guarded("disk", lambda: check_disk(locations))
    daemon = _guarded("daemon", lambda: _daemon(locations))
    yield daemon
    running = daemon.found != _NOT_RUNNING
    host = configuration.listen_host
    yield _guarded("listen port", lambda: check_port("listen port", host, configuration.listen_port, running))
    yield _guarded("data port", lambda: check_port("data port", host, configuration.data_port, running))
    yield _guarded("model", lambda: _model(locations, configuration))


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """The check's finding; what it raises is a finding too."""
    try:
        return check()
    except (KvasirError, OSError, ValueError, ImportError) as error:
        return Check(name, False, in_words(error), "see the message")


def check_python() -> Check:
    """The interpreter that runs this: 3.11 to 3.13."""
    found = platform.python_version()
    ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Check("python", ok, found, "" if ok else "install with Python 3.11, 3.12 or 3.13")


def _native_library() -> Check:
    from kvasir_node import native_library

    try:
        native = native_library.load()
    except KvasirError as error:
        return Check("native library", False, str(error), "run the installation again")
    return Check("native library", True, f"ABI {native.abi}")


def _ggml() -> Check:
    """Whether the process has exactly one ggml, and the one that the native library was written for."""
    from kvasir_node import native_library

    try:
        native_library.self_check()
    except KvasirError as error:
        return Check(
            "ggml", False, str(error), "install llama-cpp-python as this package pins it, and no other"
        )
    return Check("ggml", True, f"one copy, version {native_library.load().ggml_version}")


def _llama_cpp() -> Check:
    return Check("llama.cpp", True, f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}")


def _devices(wanted: str) -> Check:
    from kvasir_node.engine.llama_log import llama_log_captured
    from kvasir_node.ggml_devices import list_backends, list_devices

    signs = frozenset(each for each in _SIGNS_OF_HARDWARE if Path(each).exists())
    with llama_log_captured():  # backends introduce themselves on standard error
        return check_devices(wanted, list_devices(), list_backends(), signs)


def check_devices(
    wanted: str, devices: Sequence[GgmlDevice], backends: Sequence[str], signs: frozenset[str]
) -> Check:
    """What llama.cpp can compute on, where ``wanted`` puts a backbone's trunk, and why not elsewhere.

    ``signs`` are the files of `_SIGNS_OF_HARDWARE` that are there. Wrong is only a device that is asked for
    and missing; hardware that nothing uses is told, with what would change it.
    """
    from kvasir_node.ggml_devices import choose_device

    remedies = []
    try:
        chosen = choose_device(wanted, devices)
    except KvasirError as error:
        return Check("devices", False, str(error), f"set engine.device to none, or see {_GPU_GUIDE}")
    found = []
    for device in devices:
        text = f"{device.name} ({device.description})"
        if device.can_hold_trunk:
            text += ": the trunk's" if device is chosen else f": not used, engine.device is {wanted}"
        found.append(text)
    if any(each.can_hold_trunk for each in devices):
        if chosen is None:
            remedies.append("to use it set engine.device to auto, or to its name")
    else:
        idle = [each for each in backends if each not in {each.name for each in devices} and each != "CPU"]
        found += [f"{each}: built in, and it finds no device" for each in idle]
        for sign in sorted(signs):
            what, usable_by = _SIGNS_OF_HARDWARE[sign]
            if usable_by.isdisjoint(backends):
                found.append(f"{what} is here, llama.cpp is built without {' or '.join(sorted(usable_by))}")
        if idle:
            remedies.append("check the driver and who may use it")
        if len(found) > len(devices):
            remedies.append(f"see {_GPU_GUIDE}")
    return Check("devices", True, "; ".join(found), "; ".join(remedies))


def _experts_device(wanted: str) -> Check:
    from kvasir_node.ggml_devices import choose_worker_device, list_devices

    try:
        chosen = choose_worker_device(wanted, list_devices())
    except KvasirError as error:
        return Check("experts' device", False, str(error), f"set engine.kernel_device, or see {_GPU_GUIDE}")
    return Check("experts' device", True, chosen.word)


def _opencl(configuration: Configuration) -> Check:
    from kvasir_node.kernels.opencl_devices import devices_seen_by_child

    is_wanted = configuration.engine_kernel == "opencl"
    try:
        devices = devices_seen_by_child()
    except KvasirError as error:
        return Check("opencl", not is_wanted, str(error), f"see {_OPENCL_GUIDE}" if is_wanted else "")
    return check_opencl(configuration.engine_kernel_device if is_wanted else None, devices)


def check_opencl(wanted: str | None, devices: Sequence[OpenClDevice]) -> Check:
    """Which OpenCL devices there are, and which one computes experts; ``wanted`` is None where none is to."""
    from kvasir_node.kernels.opencl_devices import choose_device

    found = [
        f"{each.number} {each.name} ({each.platform} {each.driver}, {each.kind})"
        + (", computes in F16" if each.has_f16 else "")
        for each in devices
    ]
    if wanted is None:
        remedy = "to use one for experts set engine.kernel to opencl" if devices else ""
        return Check("opencl", True, "; ".join(found) or "no device", remedy)
    try:
        chosen = choose_device(wanted, devices)
    except KvasirError as error:
        return Check("opencl", False, str(error), f"set engine.kernel_device, or see {_OPENCL_GUIDE}")
    found[chosen.number] += ": the experts'"
    return Check("opencl", True, "; ".join(found))


def check_kernel_hosts(wanted: Kernel, reasons: Mapping[Kernel, str]) -> Check:
    """Which builds of ggml for other instruction sets can be started; ``reasons`` say why others cannot.

    Wrong is only one that is to compute experts and cannot.
    """
    if reasons.get(wanted):
        return Check(
            "kernel hosts", False, reasons[wanted], f"set engine.kernel, or see {_KERNEL_HOSTS_GUIDE}"
        )
    found = [f"{name}: the experts'" if name == wanted else name for name, why in reasons.items() if not why]
    return Check("kernel hosts", True, "; ".join(found) or "none is built")


def check_cpu(machine: str, features: frozenset[str]) -> Check:
    """Whether the processor has the instructions that matter most; unknown processors are let pass."""
    wanted = _FAST_FEATURES.get(machine)
    found = f"{cpu_name()} ({machine})"
    if wanted is None or not features or wanted in features:
        return Check("cpu", True, found)
    return Check(
        "cpu", False, f"{found} without {wanted}", "expect several times less speed, or use another machine"
    )


def check_memory(available_bytes: int | None) -> Check:
    """Whether an engine with a small model fits."""
    if available_bytes is None:
        return Check("memory", True, "the system does not tell")
    found = f"{available_bytes >> 20} MiB available"
    ok = available_bytes >= MEMORY_BYTES_MIN
    return Check("memory", ok, found, "" if ok else "close other programs: less than 1 GiB is available")


def _tls() -> Check:
    ok = ssl.HAS_TLSv1_3
    return Check("tls", ok, ssl.OPENSSL_VERSION, "" if ok else "use a Python with OpenSSL 1.1.1 or newer")


def _congestion_control() -> Check:
    """Whether sockets may leave a pacing default: BBR makes tokens up to 45 % slower over distance."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return Check("congestion control", True, "this system's own; it cannot be chosen")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        default = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        except OSError:
            remedy = "" if default != "bbr" else "allow cubic in net.ipv4.tcp_allowed_congestion_control"
            return Check("congestion control", not remedy, f"{default}; cubic is not allowed", remedy)
    return Check("congestion control", True, f"cubic (the default is {default})")


def _boot_clock() -> Check:
    """Leases are measured on a clock that goes on while the machine is suspended."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return Check("boot clock", False, "there is no CLOCK_BOOTTIME", "run the node on Linux or Android")
    return Check("boot clock", True, f"{time.clock_gettime(time.CLOCK_BOOTTIME):.0f} s since the start")


def check_wall_clock(now_s: float) -> Check:
    """Whether the date can be right: certificates and records expire by it."""
    found = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now_s)) if math.isfinite(now_s) else "no time"
    ok = math.isfinite(now_s) and time.gmtime(now_s).tm_year >= _YEAR_OF_RELEASE
    return Check("wall clock", ok, found, "" if ok else "set the clock, or switch time synchronisation on")


def check_home(locations: Locations) -> Check:
    """Whether the home's directories and its identity belong to this user alone; a new home is fine."""
    for directory in (locations.data, locations.state, locations.cache, locations.runtime):
        with contextlib.suppress(FileNotFoundError):
            status = directory.stat()
            if status.st_uid != os.geteuid():
                return Check("home", False, f"{directory} belongs to another user", "use another --home")
            if not os.access(directory, os.W_OK | os.X_OK):
                if os.statvfs(directory).f_flag & os.ST_RDONLY:
                    remedy = "mount its file system for writing, or use another --home"
                    return Check("home", False, f"{directory} is on a read-only file system", remedy)
                return Check("home", False, f"{directory} cannot be written", f"chmod u+rwx {directory}")
    with contextlib.suppress(FileNotFoundError):
        mode = stat.S_IMODE(locations.identity_file.stat().st_mode)
        if mode & 0o077:
            return Check(
                "home",
                False,
                f"{locations.identity_file} can be read by others (mode {mode:o})",
                f"chmod 600 {locations.identity_file}, and make a new identity if others may have read it",
            )
        return Check("home", True, str(locations.data))
    return Check("home", True, f"{locations.data}, without an identity yet")


def check_disk(locations: Locations) -> Check:
    """Whether there is room for a small model's files where the home is, or would be."""
    place = next(each for each in (locations.data, *locations.data.parents) if each.exists())
    free_bytes = shutil.disk_usage(place).free
    ok = free_bytes >= DISK_BYTES_MIN + SPARE_BYTES
    return Check(
        "disk", ok, f"{free_bytes >> 20} MiB free", "" if ok else f"make room on the disk of {place}"
    )


_NOT_RUNNING: Final = "not running"


def _daemon(locations: Locations) -> Check:
    """Running or not are both fine; running and not answering is not."""
    try:
        document: dict[str, Any] = json.loads(trio.run(request_status, locations))
    except NotRunning:
        return Check("daemon", True, _NOT_RUNNING)
    except DaemonUnreachable as error:
        return Check("daemon", False, str(error), "end its process and start it again")
    except KvasirError as error:
        return Check("daemon", False, str(error), "stop it with 'kvasir-node stop' and start it again")
    return Check("daemon", True, f"running: {document.get('state', 'unknown')}")


def check_port(name: str, host: str, port: int, running: bool) -> Check:
    """Whether a daemon could listen there now; its own port is taken while it runs."""
    place = f"{host} port {port}" if port else f"{host}, any free port"
    if running and port:
        return Check(name, True, f"{place}: the daemon's while it runs")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            return Check(name, False, f"{place}: {error.strerror}", "choose another address or port")
    return Check(name, True, place)


def _model(locations: Locations, configuration: Configuration) -> Check:
    """Whether the configured model, or the package's demo model, is there."""
    from kvasir_node.model.store import DEMO_MODEL

    named = configuration.model
    if named is None:
        found = [f"{each.name} in this home" for each in ModelStore(locations.models).list()]
        if DEMO_MODEL.exists():
            found.append("the demo model")
        remedy = "" if found else "add one with 'kvasir-node models add FILE', or install the package again"
        return Check("model", bool(found), ", ".join(found) or "none", remedy)
    if Path(named).exists():
        return Check("model", True, named)
    stored = ModelStore(locations.models).get(named)
    if not stored.has_source:
        return Check("model", False, f"{stored.source} has gone", "put the file back, or add it again")
    return Check("model", True, f"{stored.name} {stored.digest[:12]}")
