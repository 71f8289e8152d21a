"""The token of this home's gateway: a file that only its owner can read.

Decides which file may hold it, as ssh does with keys: whoever else could read it would have it. What a token
must look like, and where one is needed, are the gateway's to say (`gateway.doors`). It is in no variable, no
flag and no configuration, since those are shown; and it is never logged.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvasir_node.small_file import open_regular_file
from kvasir_proto.errors import ConfigurationInvalid

_BYTES_MAX: Final = 4096


def load_gateway_token(path: Path) -> str | None:
    """The token in the file, without the line's end; None where there is no file.

    Raises `ConfigurationInvalid` for a file that others may read, or that is no text of one line.
    """
    try:
        with open_regular_file(path) as file:
            status = os.fstat(file.fileno())
            data = file.read(_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationInvalid(f"{path} cannot be read: {error.strerror or error}") from error
    if status.st_mode & 0o077:
        raise ConfigurationInvalid(f"{path} may be read by others: chmod 600 {path}")
    if status.st_uid != os.geteuid():
        raise ConfigurationInvalid(f"{path} belongs to another user")
    try:
        token = data.decode("ascii").removesuffix("\n")
    except UnicodeDecodeError:
        token = ""
    if not token or len(data) > _BYTES_MAX or "\n" in token:
        raise ConfigurationInvalid(f"{path} holds no token: it must be one line of visible ASCII")
    return token
