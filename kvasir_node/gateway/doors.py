"""Who may ask the gateway at all, judged by a request's head: loopback is no trust boundary.

A page in a browser can send requests to any address that its machine reaches, so whoever asks must call the
gateway by a name that is its own (a stranger's name can be made to mean 127.0.0.1), come from no other site,
and send JSON, which a form cannot. At any other address than loopback, and on Android, where every app shares
it, a token is needed as well. Cross-origin headers are never sent. Pure.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from kvasir_node.gateway.http_messages import HttpHead
from kvasir_node.gateway.refusal import Refusal
from kvasir_proto.errors import ConfigurationInvalid

OPEN_PATHS: Final = frozenset({"/", "/health/live", "/health/ready"})
"""Without a token: the dashboard, which is empty before it has one, and what those ask who watch over
processes; they tell little."""
TOKEN_LENGTH_MIN: Final = 16

_AUTHORITY: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,255})(:[0-9]{1,5})?", re.ASCII)
_JSON: Final = re.compile(r"application/json(\s*;\s*charset=\"?utf-8\"?)?\s*", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Doors:
    """What is asked of a request. ``names`` are host names of this machine; ``origins`` other sites that may
    ask, each as a browser writes it. Raises `ConfigurationInvalid` where a token is needed and missing.
    """

    address: str
    token: str | None = None
    is_android: bool = False
    names: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.token is not None and (
            len(self.token) < TOKEN_LENGTH_MIN or not re.fullmatch(r"[!-~]+", self.token)
        ):
            raise ConfigurationInvalid(
                f"a gateway's token has at least {TOKEN_LENGTH_MIN} characters, all of them visible ASCII"
            )
        if self.token is None and self.is_android:
            raise ConfigurationInvalid("on Android the gateway needs a token: every app reaches loopback")
        if self.token is None and not ipaddress.ip_address(self.address).is_loopback:
            raise ConfigurationInvalid(
                f"a gateway at {self.address} needs a token: who is not on this machine reaches it too"
            )

    def check(self, head: HttpHead) -> None:
        """Raise `Refusal` for a request that may not come in."""
        if not head.path.startswith("/"):
            raise Refusal(400, "a request names a path of this host", code="bad_target")
        self._check_host(head)
        self._check_origin(head)
        if head.path not in OPEN_PATHS:
            self._check_token(head)

    def is_known(self, head: HttpHead) -> bool:
        """Whether whoever asks has the token, or needs none."""
        if self.token is None:
            return True
        scheme, _, credentials = (head.header("authorization") or "").partition(" ")
        given = credentials.strip().encode("latin-1", "replace")
        return hmac.compare_digest(given, self.token.encode()) and scheme.lower() == "bearer"

    def _check_host(self, head: HttpHead) -> None:
        match = _AUTHORITY.fullmatch(head.header("host") or "")
        if match is None or not self._is_ours(match["host"].lower()):
            raise Refusal(403, "the gateway is not called by that name (Host)", code="wrong_host")

    def _is_ours(self, host: str) -> bool:
        if host == "localhost" or host in self.names:
            return True
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        # Who wrote an address has resolved no stranger's name.
        return address.is_loopback or not ipaddress.ip_address(self.address).is_loopback

    def _check_origin(self, head: HttpHead) -> None:
        origins = [value for name, value in head.headers if name == "origin"]
        host = head.header("host")
        for origin in origins:
            if origin not in (f"http://{host}", f"https://{host}") and origin not in self.origins:
                raise Refusal(403, "another site's pages may not ask here (Origin)", code="wrong_origin")

    def _check_token(self, head: HttpHead) -> None:
        if not self.is_known(head):
            raise Refusal(
                401,
                "the gateway needs its token: Authorization: Bearer ...",
                code="invalid_api_key",
                headers=(("WWW-Authenticate", "Bearer"),),
            )


def require_json(head: HttpHead) -> None:
    """Raise `Refusal` for a body that a form could have sent."""
    if head.method == "POST" and not _JSON.fullmatch(head.header("content-type") or ""):
        raise Refusal(415, "a body is JSON, and Content-Type says so: application/json", code="not_json")
