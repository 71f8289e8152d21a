"""What the user chose, from four places, each choice remembering which.

A flag wins over a `KVASIR_*` variable, that over `kvasir.toml`, that over the default. A key nobody knows
is an error wherever it stands, because a misspelt setting that is silently ignored is worse than a refusal.
Each key is declared once, as a field below: its name, what it accepts, its default, what it is for. It
reads one file and prints nothing; where that file is, `locations` says.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from kvasir_node.small_file import read_small_file
from kvasir_proto.errors import ConfigurationInvalid, UsageError
from kvasir_proto.ids import is_node_id
from kvasir_proto.limits import (
    CONTEXT_LENGTH_MAX,
    HOLDERS_MAX,
    RANKS,
    SESSIONS_TOGETHER_MAX,
    WORKERS_MAX,
    Kernel,
    Rank,
)

FILE_SIZE_MAX: Final = 1 << 20
"""Bytes of the largest `kvasir.toml`."""
_ENVIRONMENT_PREFIX: Final = "KVASIR_"
_SHORT_FLAGS: Final = {
    "swarm.bootstrap": "--bootstrap",
    "swarm.workers_min": "--workers-min",
    "swarm.holders": "--holders",
    "swarm.lan": "--lan",
    "node.ranks": "--ranks",
    "node.memory_mib": "--memory-mib",
    "engine.threads": "--threads",
    "engine.device": "--device",
    "engine.kernel": "--kernel",
    "engine.kernel_device": "--kernel-device",
}
"""Flags of `run` that go without their section."""
_NOT_KEYS: Final = frozenset({"KVASIR_HOME"})
"""Variables of ours that are not keys: they say where the file is, so they cannot be in it."""
_ADDRESS: Final = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>\d{1,5})/p2p/(?P<node>[^/]+)"
)
_HOST: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", re.ASCII)
_SITE: Final = re.compile(r"https?://(?:[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?", re.ASCII)
"""As a browser writes it: small letters, no path."""
_NAMES_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from."""

    kind: Literal["default", "file", "environment", "flag"]
    detail: str
    """The file, the variable or the flag; empty for a default."""

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Setting:
    """One key with its value, as `config show` lists it."""

    name: str
    value: object
    origin: Origin
    purpose: str


class _Typed(str):
    """What a variable or a flag says: a number or a truth too can stand there only as text."""

    __slots__ = ()


class _Refused(Exception):
    """A value is not acceptable; the message finishes the sentence '... must be'."""


def _choice(*allowed: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in allowed:
            raise _Refused("one of " + ", ".join(allowed))
        return str(value)

    return parse


def _integer(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, _Typed) and re.fullmatch(r"[0-9]{1,18}", value, re.ASCII):
            value = int(value)
        # bool is an int to Python, but `threads = true` is a mistake.
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _Refused(f"a whole number from {low} to {high}")
        return value

    return parse


def _ip_address(value: object) -> str:
    try:
        return str(ipaddress.ip_address(value if isinstance(value, str) else ""))
    except ValueError:
        raise _Refused(
            "an IP address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
        ) from None


def is_address(text: str) -> bool:
    """Whether this is the address of a member, such as /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW..."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and is_node_id(match["node"]) and 0 < int(match["port"]) <= 65535


def _addresses(value: object) -> tuple[str, ...]:
    expected = _Refused("a list of addresses such as /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW...")
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise expected
    if not all(isinstance(each, str) and is_address(each) for each in value):
        raise expected
    return tuple(value)


def _list_of(value: object, expected: _Refused) -> list[object]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise expected
    return list(value)


def _node_ids(value: object) -> tuple[str, ...]:
    expected = _Refused("a list of node ids such as 12D3KooW...")
    ids = _list_of(value, expected)
    if not all(isinstance(each, str) and is_node_id(each) for each in ids):
        raise expected
    return tuple(str(each) for each in ids)


def _ranks(value: object) -> tuple[Rank, ...]:
    expected = _Refused(f"a list of {', '.join(RANKS)}, each at most once")
    ranks = _list_of(value, expected)
    if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(RANKS):
        raise expected
    return tuple(rank for rank in RANKS if rank in ranks)


def _host_names(value: object) -> tuple[str, ...]:
    expected = _Refused("a list of host names such as gpu.example.org")
    names = _list_of(value, expected)
    if len(names) > _NAMES_MAX or not all(isinstance(each, str) and _HOST.fullmatch(each) for each in names):
        raise expected
    return tuple(str(each).lower() for each in names)


def _origins(value: object) -> tuple[str, ...]:
    expected = _Refused("a list of sites such as https://chat.example.org, each with its port if it has one")
    sites = _list_of(value, expected)
    if len(sites) > _NAMES_MAX or not all(isinstance(each, str) and _SITE.fullmatch(each) for each in sites):
        raise expected
    return tuple(str(each) for each in sites)


def _truth(value: object) -> bool:
    truths = {True: True, False: False, "true": True, "false": False}
    if not isinstance(value, bool | _Typed) or value not in truths:
        raise _Refused("true or false")
    return truths[value]


def _name(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Refused("the name of a model, or the first digits of its digest")
    return str(value)


def _device(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[^\s,]{1,64}", value):
        raise _Refused("none, auto, or the name of one device that 'kvasir-node doctor' lists")
    return str(value)


def _part_of_name(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value.strip()) <= 64:
        raise _Refused(
            "auto, or the number or a part of the name of a device that 'kvasir-node doctor' lists"
        )
    return value.strip()


def _key(name: str, parse: Callable[[object], object], default: object, purpose: str) -> Any:
    """Declares a field as a key of the configuration."""
    return field(default=default, metadata={"name": name, "parse": parse, "purpose": purpose})


@dataclass(frozen=True, slots=True)
class Configuration:
    """Every setting, valid and typed. A field's dotted name is its key in the file: `log_level` is
    `log.level`.
    """

    log_level: Literal["debug", "info", "warning", "error"] = _key(
        "log.level", _choice("debug", "info", "warning", "error"), "info", "the least important events to log"
    )
    log_format: Literal["console", "json"] = _key(
        "log.format", _choice("console", "json"), "console", "logs for people, or one JSON object a line"
    )
    listen_host: str = _key(
        "listen.host", _ip_address, "127.0.0.1", "the address at which other nodes reach this one"
    )
    listen_port: int = _key("listen.port", _integer(0, 65535), 0, "its TCP port; 0 takes any that is free")
    data_port: int = _key(
        "data.port", _integer(0, 65535), 0, "the TCP port for activations; 0 takes any that is free"
    )
    swarm_bootstrap: tuple[str, ...] = _key(
        "swarm.bootstrap", _addresses, (), "addresses of members to join through; none founds a swarm"
    )
    swarm_workers_min: int = _key(
        "swarm.workers_min",
        _integer(0, WORKERS_MAX),
        1,
        "how many workers must have joined before a plan is made",
    )
    swarm_holders: int | None = _key(
        "swarm.holders",
        _integer(1, HOLDERS_MAX),
        None,
        "how many workers hold each expert; unset is 2 where there are 3 workers or more, else 1",
    )
    swarm_electors: tuple[str, ...] = _key(
        "swarm.electors",
        _node_ids,
        (),
        "ids of nodes that the founder's node names as electors of a pinned swarm",
    )
    swarm_lan: bool = _key("swarm.lan", _truth, False, "find members on this LAN by mDNS, and be found")
    gateway_enabled: bool = _key(
        "gateway.enabled", _truth, True, "whether this node answers OpenAI clients over HTTP"
    )
    gateway_host: str = _key(
        "gateway.host",
        _ip_address,
        "127.0.0.1",
        "the address at which it does; any but loopback needs a token in the home",
    )
    gateway_port: int = _key(
        "gateway.port", _integer(0, 65535), 8585, "its TCP port; 0 takes any that is free"
    )
    gateway_names: tuple[str, ...] = _key(
        "gateway.names", _host_names, (), "host names that clients may call it by, beside localhost"
    )
    gateway_origins: tuple[str, ...] = _key(
        "gateway.origins", _origins, (), "sites whose pages may ask, such as https://chat.example.org"
    )
    node_ranks: tuple[Rank, ...] = _key(
        "node.ranks", _ranks, ("backbone", "output", "bulk"), "the ranks that this node stands for"
    )
    node_memory_mib: int | None = _key(
        "node.memory_mib",
        _integer(1, 1 << 24),
        None,
        "MiB of memory that this node offers for experts; unset is half of what the machine has",
    )
    engine_threads: int = _key("engine.threads", _integer(1, 1024), 1, "threads that compute, in each engine")
    engine_context_tokens: int = _key(
        "engine.context_tokens",
        _integer(1, CONTEXT_LENGTH_MAX),
        4096,
        "positions of the longest session, at most what the model was trained for",
    )
    engine_ubatch_tokens: int = _key(
        "engine.ubatch_tokens", _integer(1, CONTEXT_LENGTH_MAX), 512, "positions computed at once in a prompt"
    )
    engine_sessions: int = _key(
        "engine.sessions",
        _integer(1, SESSIONS_TOGETHER_MAX),
        8,
        "sessions that decode together; with 1, what another backbone goes on with is the same bit for bit",
    )
    engine_kernel: Kernel = _key(  # noqa: RUF009 - a frozen key, as every other one
        "engine.kernel",
        _choice(*get_args(Kernel)),
        "ggml-cpu",
        "what this node computes experts with; emulated-f16 adds in F16, slowly, to show what becomes of it; "
        "ggml-neon-v8.6 and the like are ggml for other instruction sets, which 'make backends' builds",
    )
    engine_kernel_device: str = _key(
        "engine.kernel_device",
        _part_of_name,
        "auto",
        "the device of the opencl kernel: a part of its name, its number, or auto for the best there is; of "
        "the ggml-device kernel: its name, or auto for a GPU",
    )
    engine_device: str = _key(
        "engine.device",
        _device,
        "none",
        "where the backbone computes all but routed experts: a device's name, auto for a GPU, or none",
    )
    models_cache_mib: int | None = _key(
        "models.cache_mib",
        _integer(1, 1 << 30),
        None,
        "MiB on the disk for experts fetched from addresses; unset is as long as there is room",
    )
    models_give_mib_per_second: int = _key(
        "models.give_mib_per_second",
        _integer(0, 1 << 20),
        16,
        "MiB of experts a second that other members together are given from this node's disk; 0 gives none",
    )
    models_tell_address: bool = _key(
        "models.tell_address", _truth, False, "tell whoever asks the address that the model came from"
    )
    models_follow_addresses: bool = _key(
        "models.follow_addresses",
        _truth,
        False,
        "look for the swarm's model at addresses that members tell, where none is configured",
    )
    model: str | None = _key(
        "model", _name, None, "the model to run: its name, or the first digits of its digest"
    )

    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Where each key's value came from; a key that is missing has its default."""

    @property
    def models_cache_bytes(self) -> int | None:
        """`models.cache_mib` in bytes."""
        return None if self.models_cache_mib is None else self.models_cache_mib << 20

    def settings(self) -> tuple[Setting, ...]:
        """Every key with its value and where that came from, in the order of declaration."""
        return tuple(
            Setting(
                name=declared.metadata["name"],
                value=getattr(self, declared.name),
                origin=self.origins.get(declared.metadata["name"], Origin("default", "")),
                purpose=declared.metadata["purpose"],
            )
            for declared in _keys().values()
        )


def _keys() -> dict[str, Any]:
    """Each key's dataclass field, by the key's dotted name."""
    return {item.metadata["name"]: item for item in fields(Configuration) if "name" in item.metadata}


def variable_of(key: str) -> str:
    """The environment variable that sets a key: `KVASIR_LOG_LEVEL` for `log.level`."""
    return _ENVIRONMENT_PREFIX + key.replace(".", "_").upper()


def flag_of(key: str) -> str:
    """The command-line flag that sets a key: `--log-level` for `log.level`."""
    return _SHORT_FLAGS.get(key) or "--" + key.replace(".", "-").replace("_", "-")


def load_configuration(
    file: Path, environment: Mapping[str, str], flags: Mapping[str, object] | None = None
) -> Configuration:
    """The settings from `file` (which need not exist), `environment` and `flags`.

    `flags` maps dotted keys to values as the command line gave them; None means that the flag was not
    given. Raises `ConfigurationInvalid` with a sentence that names the key and where it stands: for an
    unknown key, a value of the wrong type or out of bounds, or a file that cannot be read or is not TOML; but
    `UsageError` for the value of a flag.
    """
    found: dict[str, tuple[object, Origin]] = {}
    for key, value in _from_file(file).items():
        found[key] = (value, Origin("file", str(file)))
    for variable, text in sorted(environment.items()):
        if variable.startswith(_ENVIRONMENT_PREFIX) and variable not in _NOT_KEYS:
            found[_key_of_variable(variable)] = (_Typed(text), Origin("environment", variable))
    for key, value in (flags or {}).items():
        if value is not None:
            typed = _Typed(value) if isinstance(value, str) else value
            found[key] = (typed, Origin("flag", flag_of(key)))

    keys = _keys()
    values: dict[str, Any] = {}
    for key, (value, origin) in found.items():
        if key not in keys:
            raise _unknown(key, keys, str(origin))
        try:
            values[keys[key].name] = keys[key].metadata["parse"](value)
        except _Refused as refusal:
            called_wrongly = origin.kind == "flag"
            raise (UsageError if called_wrongly else ConfigurationInvalid)(
                f"{key}, set by {origin}, is {value!r} and must be {refusal}"
            ) from None
    return Configuration(**values, origins={key: origin for key, (_, origin) in found.items()})


def _from_file(file: Path) -> dict[str, object]:
    try:
        document = tomllib.loads(read_small_file(file, FILE_SIZE_MAX).decode())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigurationInvalid(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationInvalid(f"{file} is not text in UTF-8: {error.reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationInvalid(f"{file} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigurationInvalid(f"{file} is nested too deeply") from error
    except ValueError as error:  # Python reads no number of more than 4,300 digits
        raise ConfigurationInvalid(f"{file} has a number that is too long") from error
    flat: dict[str, object] = {}
    for name, value in document.items():
        if isinstance(value, dict) and (value or any(each.startswith(f"{name}.") for each in _keys())):
            flat.update({f"{name}.{inner}": inner_value for inner, inner_value in value.items()})
        else:
            flat[name] = value
    return flat


def _key_of_variable(variable: str) -> str:
    variables = {variable_of(key): key for key in _keys()}
    if variable not in variables:
        raise _unknown(variable, variables, "environment")
    return variables[variable]


def _unknown(name: str, known: Mapping[str, object], where: str) -> ConfigurationInvalid:
    # What all variables begin with makes none of them alike.
    named = {each.removeprefix(_ENVIRONMENT_PREFIX): each for each in known}
    close = difflib.get_close_matches(name.removeprefix(_ENVIRONMENT_PREFIX), named, n=1)
    hint = f"; did you mean {named[close[0]]}?" if close else ""
    return ConfigurationInvalid(f"there is no setting {name} ({where}){hint}")
