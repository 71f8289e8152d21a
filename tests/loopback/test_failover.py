"""Eight streams over HTTP, through any node, as daemons die under them: they pause, and go on."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.loopback.daemons import PATIENCE_S, Daemon, kvasir, wait_for
from tests.loopback.test_elections import Nodes

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

N_STREAMS = 8
N_TOKENS = 40
N_BEFORE = 8
"""Tokens of a stream that have come when something dies."""
TOLERANCE = 0.05
"""Of log-probabilities where tokens are computed beside others, or a prompt in other shapes."""


class GatewayNodes(Nodes):
    """Three nodes with the demo model, each with a gateway, any of which may be the backbone."""

    def __init__(self, directory: Path) -> None:
        home = directory / "n0"
        founded = kvasir("--home", str(home), "init", "--found")
        subprocess.run(founded, check=True, capture_output=True, timeout=PATIENCE_S)
        self.daemons = [Daemon(home, "--gateway-port", "0")]
        self._start_last()
        document = self.daemons[0].wait(lambda document: document["addresses"], "an address")
        join = ("--bootstrap", document["addresses"][0], "--gateway-port", "0")
        for number in (1, 2):
            self.daemons.append(Daemon(directory / f"n{number}", *join))
            self._start_last()

    def _start_last(self) -> None:
        self.daemons[-1].has_gateway = "true"
        self.daemons[-1].start()

    def wait_settled(self) -> None:
        """Besides, each has both engines, or it may be elected before it can serve, and a gateway."""
        for daemon in self.daemons:
            daemon.wait(lambda document: all(document["engines"].values()), "both engines")
        super().wait_settled()
        for daemon in self.daemons:
            address = address_of(daemon)
            wait_for(lambda address=address: is_ready(address), f"{address} is ready")  # type: ignore[misc]


def address_of(daemon: Daemon) -> str:
    document = daemon.wait(lambda document: document["gateway"]["address"], "its gateway")
    return str(document["gateway"]["address"])


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health/ready").status_code == 200
    except httpx.HTTPError:
        return False


@dataclass
class Stream:
    """What came, and when."""

    text: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    """Between the log-probabilities of the two likeliest tokens."""
    times: list[float] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)

    @property
    def pause_s(self) -> float:
        return max(later - earlier for earlier, later in itertools.pairwise(self.times))


def read(address: str, number: int, note: Callable[[int], None]) -> Stream:
    """One stream to its end; ``note`` is told how many tokens have come."""
    body = {
        "model": httpx.get(f"{address}/v1/models").json()["data"][0]["id"],
        "prompt": [5, 6, 7 + number],
        "max_tokens": N_TOKENS,
        "temperature": 0,
        "logprobs": 2,
        "stream": True,
    }
    stream = Stream()
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            choice = event["choices"][0]
            if choice["finish_reason"]:
                stream.finishes.append(choice["finish_reason"])
            logprobs = choice["logprobs"] or {"tokens": []}
            for index, token in enumerate(logprobs["tokens"]):
                stream.text.append(token)
                first, second = sorted(logprobs["top_logprobs"][index].values(), reverse=True)[:2]
                stream.margins.append(first - second)
                stream.times.append(time.monotonic())
                note(len(stream.text))
        assert line.startswith("data: [DONE]") or not line
    return stream


def read_all(daemons: list[Daemon], when_all_have_some: Callable[[], None] = lambda: None) -> list[Stream]:
    """Eight streams at once, over these daemons."""
    addresses = [address_of(each) for each in daemons]
    left, lock = set(range(N_STREAMS)), threading.Lock()

    def note(number: int, count: int) -> None:
        with lock:
            if count >= N_BEFORE and number in left:
                left.remove(number)
                if not left:
                    when_all_have_some()

    with concurrent.futures.ThreadPoolExecutor(N_STREAMS) as pool:
        reading = [
            pool.submit(
                read,
                addresses[number % len(addresses)],
                number,
                lambda count, number=number: note(number, count),  # type: ignore[misc]
            )
            for number in range(N_STREAMS)
        ]
        streams = [each.result() for each in reading]
    assert not left
    for stream in streams:
        assert stream.finishes in (["length"], ["stop"])
        assert (len(stream.text) == N_TOKENS) == (stream.finishes == ["length"])
    return streams


def check_equivalent(undisturbed: list[Stream], streams: list[Stream]) -> None:
    """The same texts; where one parts, two tokens were as likely."""
    for one, other in zip(undisturbed, streams, strict=True):
        if one.text != other.text:
            n_same = next(
                (
                    index
                    for index, pair in enumerate(zip(one.text, other.text, strict=False))
                    if len({*pair}) > 1
                ),
                min(len(one.text), len(other.text)),
            )
            margins = [*one.margins[n_same : n_same + 1], *other.margins[n_same : n_same + 1]]
            assert min(margins) < TOLERANCE, (one.text, other.text)


def generated(daemon: Daemon) -> str:
    """A text by the command line of this node."""
    asked = kvasir("--home", str(daemon.home), "generate", "Once upon a time", "--tokens", "12")
    done = subprocess.run(
        [*asked, "--temperature", "0"], capture_output=True, check=True, timeout=PATIENCE_S, text=True
    )
    assert len(done.stdout) > 20
    return done.stdout


def test_no_stream_ends_when_a_worker_or_the_backbone_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = GatewayNodes(tmp_path)
    try:
        nodes.wait_settled()
        backbone, _ = nodes.backbone()
        gateway, worker = [each for each in nodes.daemons if each is not backbone]
        assert generated(gateway) == generated(backbone), "on the command line too"
        undisturbed = read_all([gateway, backbone])

        by_worker = read_all([gateway, backbone], lambda: worker.kill(signal.SIGKILL))
        check_equivalent(undisturbed, by_worker)
        worker.start()
        nodes.wait_settled()
        backbone, before = nodes.backbone()
        others = [each for each in nodes.daemons if each is not backbone]

        by_backbone = read_all(others, lambda: backbone.kill(signal.SIGKILL))
        check_equivalent(undisturbed, by_backbone)
        _, after = nodes.backbone(others)
        assert (after["epoch"], after["term"]) > (before["epoch"], before["term"])
        pauses = [max(each.pause_s for each in streams) for streams in (undisturbed, by_worker, by_backbone)]
        with capsys.disabled():
            sys.stdout.write(
                "\nlongest pause of {} streams: {:.2f} s undisturbed, {:.2f} s when a worker was killed, "
                "{:.2f} s when the backbone was\n".format(N_STREAMS, *pauses)
            )
    finally:
        for daemon in nodes.daemons:
            daemon.end()
