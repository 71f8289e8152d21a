"""Who may come in: by which name, from which site, with what."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvasir_node.gateway.doors import Doors, require_json
from kvasir_node.gateway.http_messages import HttpHead
from kvasir_node.gateway.refusal import Refusal
from kvasir_proto.errors import ConfigurationInvalid

TOKEN = "correct-horse-battery"
LOOPBACK = Doors("127.0.0.1")
NAMED = Doors("127.0.0.1", names=frozenset({"box.lan"}), origins=frozenset({"https://chat.example"}))
LOCKED = Doors("127.0.0.1", token=TOKEN)
EVERYWHERE = Doors("0.0.0.0", token=TOKEN)


def head(method: str = "GET", path: str = "/v1/models", **headers: str) -> HttpHead:
    sent = {"host": "localhost:8080"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpHead(method, path, tuple(sent.items()), "127.0.0.1")


def come_in(doors: Doors, asked: HttpHead) -> None:
    doors.check(asked)
    require_json(asked)


@pytest.mark.parametrize(
    "doors, asked",
    [
        *[(LOOPBACK, head(host=host)) for host in ("localhost", "LocalHost:1", "127.0.0.1:80", "127.9.9.9")],
        (LOOPBACK, head(host="[::1]:80")),
        (LOOPBACK, head(origin="http://localhost:8080")),
        (LOOPBACK, head(origin="https://localhost:8080")),
        (NAMED, head(host="box.lan:80")),
        (NAMED, head(origin="https://chat.example")),
        (LOOPBACK, head("POST", content_type="application/json")),
        (LOOPBACK, head("POST", content_type="Application/JSON; charset=UTF-8")),
        (LOCKED, head(authorization=f"Bearer {TOKEN}")),
        (LOCKED, head(authorization=f"bearer  {TOKEN}")),
        (LOCKED, head(path="/health/live")),
        (EVERYWHERE, head(host="192.0.2.7:80", authorization=f"Bearer {TOKEN}")),
    ],
)
def test_who_may_come_in(doors: Doors, asked: HttpHead) -> None:
    come_in(doors, asked)


@pytest.mark.parametrize(
    "doors, asked, status, code",
    [
        *[
            (LOOPBACK, head(host=host), 403, "wrong_host")
            for host in (
                "evil.example",
                "localhost.evil.example",
                "",
                "a b",
                "192.0.2.7",
                "localhost@evil",
                "::1",
            )
        ],
        (EVERYWHERE, head(host="evil.example", authorization=f"Bearer {TOKEN}"), 403, "wrong_host"),
        *[
            (LOOPBACK, head(origin=origin), 403, "wrong_origin")
            for origin in ("null", "http://evil.example", "http://localhost", "http://localhost:8081", "")
        ],
        *[
            (LOOPBACK, head("POST", content_type=kind), 415, "not_json")
            for kind in (
                "",
                "text/plain",
                "application/x-www-form-urlencoded",
                "application/json;charset=latin-1",
            )
        ],
        (LOOPBACK, head("POST"), 415, "not_json"),
        *[
            (LOCKED, head(authorization=value), 401, "invalid_api_key")
            for value in (
                "",
                "Bearer",
                "Bearer wrong",
                f"Basic {TOKEN}",
                f"Bearer {TOKEN}x",
                f"Bearer é{TOKEN}",
            )
        ],
        (LOCKED, head(), 401, "invalid_api_key"),
        (LOCKED, head(path="/metrics"), 401, "invalid_api_key"),
        (LOCKED, head(path="/health/live/"), 401, "invalid_api_key"),
        (LOOPBACK, head(path="http://evil.example/v1/models"), 400, "bad_target"),
    ],
)
def test_who_may_not(doors: Doors, asked: HttpHead, status: int, code: str) -> None:
    with pytest.raises(Refusal) as refused:
        come_in(doors, asked)
    assert (refused.value.status, refused.value.code) == (status, code)
    assert (status == 401) == (("WWW-Authenticate", "Bearer") in refused.value.headers())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Doors("0.0.0.0"),
        lambda: Doors("192.0.2.7"),
        lambda: Doors("::"),
        lambda: Doors("127.0.0.1", is_android=True),
        lambda: Doors("127.0.0.1", token="short"),
        lambda: Doors("127.0.0.1", token="not visible ascii"),
    ],
)
def test_where_a_token_is_needed(make: Callable[[], Doors]) -> None:
    with pytest.raises(ConfigurationInvalid, match="token"):
        make()


def test_a_second_origin_is_looked_at_too() -> None:
    asked = HttpHead(
        "GET", "/v1/models", (("host", "localhost"), ("origin", "http://localhost"), ("origin", "null")), ""
    )
    with pytest.raises(Refusal, match="Origin"):
        LOOPBACK.check(asked)
