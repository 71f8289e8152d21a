"""The devices that the installed llama.cpp can compute on, and which are meant for trunk and experts.

What is here depends on how llama-cpp-python was built and on the drivers that are there: a build without CUDA
has no CUDA device on any machine. Asking starts the drivers, so only processes that compute, and `doctor`,
should. It refuses to know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal, TypeAlias

from kvasir_node.driver_child import devices_told_by, tell_devices
from kvasir_node.native_library import load_ggml
from kvasir_proto.errors import ConfigurationInvalid, KvasirError
from kvasir_proto.limits import as_sentence

DeviceKind: TypeAlias = Literal["cpu", "gpu", "integrated gpu", "accelerator", "other"]

NO_DEVICE: Final = "none"
"""The trunk stays on the processor."""
ANY_DEVICE: Final = "auto"
"""The first graphics processor there is, and the processor where there is none."""

CHILD_TIMEOUT_S: Final = 60.0
"""How long drivers may take to say what they have."""

NAME_LENGTH_MAX: Final = 64
"""As `kvasir_proto.limits.Word` has it."""

_KINDS: Final[tuple[DeviceKind, ...]] = ("cpu", "gpu", "integrated gpu", "accelerator")
_TRUNK_KINDS: Final[tuple[DeviceKind, ...]] = ("gpu", "integrated gpu")
"""What can hold a trunk, the better kind first."""


@dataclass(frozen=True, slots=True)
class GgmlDevice:
    """One device. ``address`` is ggml's, of this process; memory is 0 where the driver tells none."""

    name: str
    description: str
    kind: DeviceKind
    memory_free_bytes: int
    memory_total_bytes: int
    address: int

    @property
    def word(self) -> str:
        """The name and the driver's description, as long as capability records have room for one."""
        return as_sentence(f"{self.name} {self.description}".strip())[:NAME_LENGTH_MAX] or "unnamed"

    @property
    def can_hold_trunk(self) -> bool:
        """Whether a trunk may be put there: the processor has it anyway, accelerators only help it."""
        return self.kind in _TRUNK_KINDS


def list_devices() -> tuple[GgmlDevice, ...]:
    """Every device of this process's ggml, in its order. Raises `IncompatibleVersion`."""
    ggml = load_ggml()
    devices = []
    for index in range(ggml.device_count()):
        address = ggml.device_at(index)
        kind = ggml.device_kind(address)
        free_bytes, total_bytes = ggml.device_memory(address)
        devices.append(
            GgmlDevice(
                name=ggml.device_name(address),
                description=ggml.device_description(address),
                kind=_KINDS[kind] if kind < len(_KINDS) else "other",
                memory_free_bytes=free_bytes,
                memory_total_bytes=total_bytes,
                address=address,
            )
        )
    return tuple(devices)


def devices_seen_by_child() -> tuple[GgmlDevice, ...]:
    """`list_devices` as a process of its own sees them: addresses are 0. Raises `ConfigurationInvalid`."""
    return tuple(GgmlDevice(**each) for each in devices_told_by(__name__, "GPU", CHILD_TIMEOUT_S, {}))


def list_backends() -> tuple[str, ...]:
    """The names of the backends that ggml was built with, with or without a device here."""
    ggml = load_ggml()
    return tuple(ggml.backend_name(ggml.backend_at(index)) for index in range(ggml.backend_count()))


def choose_device(wanted: str, devices: Sequence[GgmlDevice]) -> GgmlDevice | None:
    """The device that ``wanted`` means: `none`, `auto`, or a device's name; None is the processor alone.

    Raises `ConfigurationInvalid` for a device that is not there or cannot hold a trunk.
    """
    if wanted == NO_DEVICE:
        return None
    fit = sorted(
        (each for each in devices if each.can_hold_trunk), key=lambda each: _TRUNK_KINDS.index(each.kind)
    )
    if wanted == ANY_DEVICE:
        return fit[0] if fit else None
    chosen = next((each for each in fit if each.name.lower() == wanted.lower()), None)
    if chosen is None:
        there = ", ".join(each.name for each in fit) or "no graphics processor"
        raise ConfigurationInvalid(
            f"the trunk cannot be put on {wanted!r}: the installed llama.cpp has {there} (see 'kvasir-node "
            "doctor')"
        )
    return chosen


def choose_worker_device(wanted: str, devices: Sequence[GgmlDevice]) -> GgmlDevice:
    """The device that ``wanted`` means for experts: `auto`, or the name of any, the processor's too.

    Raises `ConfigurationInvalid` for a device that is not there.
    """
    if wanted != ANY_DEVICE:
        chosen = next((each for each in devices if each.name.casefold() == wanted.casefold()), None)
    else:
        chosen = choose_device(ANY_DEVICE, devices)
    if chosen is None:
        there = ", ".join(each.name for each in devices) or "none"
        what = "graphics processor" if wanted == ANY_DEVICE else f"device {wanted!r}"
        raise ConfigurationInvalid(
            f"the installed llama.cpp has no {what} for experts: its devices are {there} (see "
            "'kvasir-node doctor')"
        )
    return chosen


def worker_device(wanted: str) -> GgmlDevice:
    """`choose_worker_device` among this process's devices."""
    return choose_worker_device(wanted, list_devices())


def trunk_device(wanted: str) -> GgmlDevice | None:
    """`choose_device` among this process's devices; for `none` no driver is asked."""
    return None if wanted == NO_DEVICE else choose_device(wanted, list_devices())


def _answer() -> dict[str, object]:
    from kvasir_node.engine.llama_log import llama_log_captured

    try:
        with llama_log_captured():  # backends introduce themselves
            return {"devices": [asdict(replace(each, address=0)) for each in list_devices()]}
    except KvasirError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    tell_devices(_answer)
