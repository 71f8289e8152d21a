"""What a process writes about itself, for people and for programs."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from kvasir_node.telemetry import (
    REPEATS_SHOWN_MAX,
    bind_process,
    configure_telemetry,
    get_logger,
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_is_one_object_a_line() -> None:
    stream = io.StringIO()
    configure_telemetry("info", "json", {}, stream)
    get_logger(node="12D3").info("member_joined", workers=3, path=io)
    (event,) = lines(stream)
    assert event["event"] == "member_joined"
    assert (event["node"], event["workers"], event["level"]) == ("12D3", 3, "info")
    assert str(event["timestamp"]).endswith("Z")


def test_less_important_events_are_left_out() -> None:
    stream = io.StringIO()
    configure_telemetry("warning", "json", {}, stream)
    get_logger().info("member_joined")
    get_logger().warning("member_lost")
    assert [event["event"] for event in lines(stream)] == ["member_lost"]


def test_keys_of_the_process_are_on_every_event_of_every_thread() -> None:
    stream = io.StringIO()
    configure_telemetry("info", "json", {}, stream)
    bind_process(role="worker", term=1)
    thread = threading.Thread(target=lambda: get_logger().info("shard_loaded", term=2))
    thread.start()
    thread.join()
    (event,) = lines(stream)
    assert (event["role"], event["term"]) == ("worker", 2)


def test_configuring_again_replaces_what_was_there() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_telemetry("info", "json", {}, first)
    bind_process(role="worker")
    configure_telemetry("info", "json", {}, second)
    logging.getLogger("some.library").warning("careful")
    assert first.getvalue() == ""
    (event,) = lines(second)
    assert "role" not in event


def test_libraries_come_out_as_events() -> None:
    stream = io.StringIO()
    configure_telemetry("info", "json", {}, stream)
    logging.getLogger("some.library").warning("took %d tries", 3)
    (ours,) = [each for each in logging.getLogger().handlers if "telemetry" in type(each).__module__]
    ours.handle(
        logging.makeLogRecord({"name": "some.library", "levelno": 30, "msg": "bad %d", "args": ("x",)})
    )
    logging.getLogger("some.library").critical("the end")
    assert [(event["event"], event["library"], event["level"]) for event in lines(stream)] == [
        ("took 3 tries", "some.library", "warning"),
        ("bad %d", "some.library", "warning"),
        ("the end", "some.library", "error"),
    ]


def test_an_exception_is_in_the_event() -> None:
    stream = io.StringIO()
    configure_telemetry("info", "json", {}, stream)
    try:
        raise RuntimeError("out of cheese")
    except RuntimeError:
        get_logger().exception("engine_failed")
    assert "out of cheese" in str(lines(stream)[0]["exception"])


def test_libp2p_is_quiet_unless_somebody_is_looking_for_a_bug() -> None:
    stream = io.StringIO()
    configure_telemetry("info", "json", {}, stream)
    assert not logging.getLogger("libp2p.transport.tcp").isEnabledFor(logging.ERROR)
    configure_telemetry("debug", "json", {}, stream)
    assert logging.getLogger("libp2p.transport.tcp").isEnabledFor(logging.INFO)
    assert not logging.getLogger("libp2p.stream_muxer.yamux").isEnabledFor(logging.DEBUG)


@pytest.mark.parametrize(
    "stream, environment, coloured",
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ],
)
def test_colours_only_where_they_are_wanted(
    stream: io.StringIO, environment: dict[str, str], coloured: bool
) -> None:
    configure_telemetry("info", "console", environment, stream)
    get_logger().info("member_joined", workers=3)
    text = stream.getvalue()
    assert "member_joined" in text
    assert ("\x1b[" in text) is coloured


def test_a_closed_pipe_stops_nobody() -> None:
    configure_telemetry("info", "json", {}, Broken())
    get_logger().info("member_joined")
    closed = io.StringIO()
    closed.close()
    configure_telemetry("info", "console", {"NO_COLOR": "1", "TERM": "dumb"}, closed)
    get_logger().info("member_joined")


@pytest.mark.parametrize("kind", ["stream_refused", "message_refused", "election_message_refused"])
def test_what_strangers_cause_again_and_again_is_summed_up(kind: str) -> None:
    stream = io.StringIO()
    configure_telemetry("info", "json", {}, stream, repeats_interval_s=0.2)
    for number in range(400):
        get_logger().warning(kind, node=str(number))
        get_logger().info("holder_connected")
    deadline = time.monotonic() + 10.0
    while "repeats_left_out" not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    events = lines(stream)
    shown = [event["node"] for event in events if event["event"] == kind]
    assert shown == [str(number) for number in range(REPEATS_SHOWN_MAX)]
    assert sum(event["event"] == "holder_connected" for event in events) == 400, "nothing of ours is left out"
    (summary,) = [event for event in events if event["event"] == "repeats_left_out"]
    assert (summary["of"], summary["count"]) == (kind, 400 - REPEATS_SHOWN_MAX)
    get_logger().warning(kind, node="later")
    assert lines(stream)[-1]["node"] == "later", "a new interval has begun"
