"""Where a node keeps its things on this machine, and nothing about what they hold.

Decides every path once: `--home` (or `KVASIR_HOME`) puts all of them under one directory; without it the
XDG directories are used, and Termux's `$PREFIX` for what lives only as long as the system runs. It stands
apart so that the rest never asks the environment, and it never falls back to the system's temporary
directory: that one is shared, may be emptied at any time, and does not exist on Android. It opens no file
but makes directories private.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvasir_proto.errors import ConfigurationInvalid

SOCKET_PATH_BYTES_MAX: Final = 107
"""The longest path a Unix socket can have on Linux: `sun_path` is 108 bytes, its final zero included."""

_APPLICATION: Final = "kvasir"
_SOCKET_NAME: Final = "control.sock"


@dataclass(frozen=True, slots=True)
class Locations:
    """The paths of one home. None of them need exist until `prepare` is called."""

    config_file: Path
    """`kvasir.toml`; optional."""
    data: Path
    """What cannot be made again: the identity and the models' own files."""
    state: Path
    """What must survive a restart: fences, votes, the newest electorate."""
    cache: Path
    """What can be made again: reference files, measurements."""
    runtime: Path
    """What lives as long as the daemon; only its owner may enter."""

    @property
    def identity_file(self) -> Path:
        """The node's private key."""
        return self.data / "identity.pem"

    @property
    def lock_file(self) -> Path:
        """Held by the one daemon of this home."""
        return self.data / "lock"

    @property
    def gateway_token_file(self) -> Path:
        """What clients of the gateway have to know; optional."""
        return self.data / "gateway-token"

    @property
    def measurements(self) -> Path:
        """What was measured of the kernels of this machine."""
        return self.cache / "measurements"

    @property
    def models(self) -> Path:
        """The model store."""
        return self.data / "models"

    @property
    def control_socket(self) -> Path:
        """Where the daemon listens for the command line; at most `SOCKET_PATH_BYTES_MAX` bytes."""
        return self.runtime / _SOCKET_NAME

    def prepare(self) -> None:
        """Make the directories, readable by their owner only.

        Raises `ConfigurationInvalid` when one cannot be made, belongs to somebody else, or is not a
        directory.
        """
        for directory in (self.data, self.models, self.state, self.cache, self.runtime):
            _make_private(directory)

    def named(self) -> dict[str, Path]:
        """Every path by its name, for `config paths`."""
        return {
            "config_file": self.config_file,
            "data": self.data,
            "state": self.state,
            "cache": self.cache,
            "runtime": self.runtime,
            "identity_file": self.identity_file,
            "lock_file": self.lock_file,
            "gateway_token_file": self.gateway_token_file,
            "models": self.models,
            "control_socket": self.control_socket,
        }


def locate(home: Path | None, environment: Mapping[str, str]) -> Locations:
    """The paths of the home named by `--home`, or by the environment if `home` is None.

    The same arguments give the same paths, so a command finds the socket of the daemon that was started
    likewise. Raises `ConfigurationInvalid` when no home can be found, a path is not UTF-8, or none of the
    places for the socket is short enough.
    """
    if home is None and environment.get("KVASIR_HOME"):
        home = Path(environment["KVASIR_HOME"])
    if home is not None:
        root = Path(os.path.abspath(home.expanduser()))  # noqa: PTH100 - resolve() would follow symbolic links
        places = {
            "config_file": root / "kvasir.toml",
            "data": root,
            "state": root / "state",
            "cache": root / "cache",
        }
        first_choice = root / "run"
    else:
        user_home = _home_of_user(environment)
        data = _xdg(environment, "XDG_DATA_HOME", user_home / ".local" / "share")
        config = _xdg(environment, "XDG_CONFIG_HOME", user_home / ".config")
        state = _xdg(environment, "XDG_STATE_HOME", user_home / ".local" / "state")
        cache = _xdg(environment, "XDG_CACHE_HOME", user_home / ".cache")
        places = {
            "config_file": config / "kvasir.toml",
            "data": data,
            "state": state,
            "cache": cache,
        }
        system_runtime = _system_runtime(environment)
        first_choice = state / "run" if system_runtime is None else system_runtime
    found = Locations(**places, runtime=_runtime(first_choice, places["data"], environment))
    for path in found.named().values():
        try:
            str(path).encode()
        except UnicodeEncodeError:
            # Engines, logs and documents are told paths as text.
            raise ConfigurationInvalid(f"the path {path} is not valid UTF-8: choose another --home") from None
    return found


def _xdg(environment: Mapping[str, str], variable: str, default: Path) -> Path:
    value = environment.get(variable, "")
    # The specification says to ignore a relative path, not to guess what it is relative to.
    parent = Path(value) if value.startswith("/") else default
    return parent / _APPLICATION


def _home_of_user(environment: Mapping[str, str]) -> Path:
    value = environment.get("HOME", "")
    if value.startswith("/"):
        return Path(value)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise ConfigurationInvalid(
            "HOME is not set and this user has no home directory: say where to keep things with --home"
        ) from None


def _system_runtime(environment: Mapping[str, str]) -> Path | None:
    """The directory the system empties when it restarts, if it has one for this user."""
    given = environment.get("XDG_RUNTIME_DIR", "")
    if given.startswith("/"):
        return Path(given) / _APPLICATION
    prefix = environment.get("PREFIX", "")
    # Elsewhere PREFIX belongs to whoever is building something, so it counts only on Termux.
    if prefix.startswith("/") and (
        "TERMUX_VERSION" in environment or prefix.endswith("/com.termux/files/usr")
    ):
        return Path(prefix) / "var" / "run" / _APPLICATION
    return None


def _runtime(first_choice: Path, data: Path, environment: Mapping[str, str]) -> Path:
    """The first directory whose socket has a short enough path.

    A home deep in a file system makes too long a path. Then a directory named after the home, in a place
    that is short, takes over; the name comes from the path alone, so that every command computes the same
    one.
    """
    name = hashlib.sha256(os.fsencode(data)).hexdigest()[:16]
    choices = [first_choice]
    system_runtime = _system_runtime(environment)
    if system_runtime is not None:
        choices.append(system_runtime / name)
    choices.append(_home_of_user(environment) / f".{_APPLICATION}" / name)
    for choice in choices:
        if len(os.fsencode(choice / _SOCKET_NAME)) <= SOCKET_PATH_BYTES_MAX:
            return choice
    raise ConfigurationInvalid(
        f"the path of the control socket, {choices[0] / _SOCKET_NAME}, is longer than the "
        f"{SOCKET_PATH_BYTES_MAX} bytes a socket's path can have: choose a shorter --home"
    )


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.geteuid():
            raise ConfigurationInvalid(f"{directory} belongs to another user: choose another --home")
        if stat.S_IMODE(status.st_mode) & 0o077:
            directory.chmod(0o700)
    except OSError as error:
        raise ConfigurationInvalid(f"cannot use the directory {directory}: {error.strerror}") from error
