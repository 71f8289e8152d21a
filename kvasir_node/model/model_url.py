"""The address of a model file on a web server, with as much of a path's manners as naming parts needs.

Decides which addresses are taken: `http` and `https`, a host, no credentials. It is shown without its query,
which may be a signature that gives access, and without credentials where it is refused for them. It fetches
nothing; `http_file` does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from kvasir_proto.errors import UsageError

URL_LENGTH_MAX: Final = 2048

_CREDENTIALS: Final = re.compile(r"//[^/]*@")
_BEGIN: Final = re.compile(r"https?://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelUrl:
    """One address. Raises `UsageError` for one that is not taken."""

    url: str

    def __post_init__(self) -> None:
        if len(self.url) > URL_LENGTH_MAX or not self.url.isascii() or not self.url.isprintable():
            raise UsageError(f"an address has at most {URL_LENGTH_MAX} printable ASCII characters")
        try:
            parts = urlsplit(self.url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"{self} is no address: {error}") from error
        if parts.scheme not in ("http", "https") or not host or " " in self.url:
            raise UsageError(f"{self} is no address of the form https://HOST/PATH")
        if parts.username is not None or parts.password is not None:
            raise UsageError("an address with a user's name or password cannot be used")
        if not self.name or "/" in self.name or not self.name.isprintable():
            raise UsageError(f"{self} does not end in the name of a file")

    @property
    def name(self) -> str:
        """The last part of the path, as a file would be called."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    @property
    def stem(self) -> str:
        """The name without its last suffix."""
        return Path(self.name).stem

    def with_name(self, name: str) -> ModelUrl:
        """The address of a file beside this one."""
        parts = urlsplit(self.url)
        path = parts.path.rpartition("/")[0] + "/" + quote(name)
        return ModelUrl(urlunsplit(parts._replace(path=path)))

    def __str__(self) -> str:
        return _CREDENTIALS.sub("//", self.url.partition("?")[0].partition("#")[0])


Location: TypeAlias = Path | ModelUrl
"""Where a model file is: on this machine, or at an address."""


def location_of(text: str) -> Location:
    """The address or the path that a text means. Raises `UsageError` as `ModelUrl` does."""
    return ModelUrl(text) if _BEGIN.match(text) else Path(text)
