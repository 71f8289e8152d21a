"""A swarm of unlike workers: ggml, an OpenCL device and an ARM processor under qemu, each with a part.

As a command, `python -m tests.loopback.mixed_swarm --positions 4096`: how far its logits are from a single
process's on the text that was held out when the model was trained, as one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import trio

from kvasir_node import app
from kvasir_node.config import load_configuration
from kvasir_node.control import connect_daemon
from kvasir_node.kernels.host_builds import built_hosts
from kvasir_node.local_swarm import RunSettings, evaluate_logits, start_reference
from kvasir_node.measure.statistics import LogitsComparison, compare_logits, open_logits
from kvasir_node.model.store import DEMO_MODEL
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_proto.limits import Kernel
from kvasir_proto.messages.local import EvaluateReply, EvaluateRequest
from tests.loopback.daemons import PATIENCE_S, Daemon, kvasir
from tests.node.opencl_here import opencl_devices
from tests.plain_llama import silence

KERNELS: Final[tuple[Kernel, ...]] = ("ggml-cpu", "opencl", "ggml-neon-v8.6")
MEMORY_MIB: Final = 8
"""Of each worker. The demo model's experts have 19.1 MiB: nobody can be spared, however slow."""

START_PATIENCE_S: Final = 3 * PATIENCE_S
"""An emulated processor takes its time to say how fast it is and what it computes."""

WINDOW: Final = 512


def why_not() -> str:
    """Why there can be no such swarm here; empty if there can."""
    return built_hosts()["ggml-neon-v8.6"] or opencl_devices()[1]


class MixedSwarm:
    """A founder and one worker for each of `KERNELS`. Close it."""

    def __init__(self, directory: Path) -> None:
        home = directory / "founder"
        founding = kvasir("--home", str(home), "init", "--found")
        subprocess.run(founding, check=True, capture_output=True, timeout=PATIENCE_S)
        self.founder = Daemon(home, "--workers-min", str(len(KERNELS)), "--holders", "1")
        self.workers: dict[Kernel, Daemon] = {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self.founder.start()
        address = self.founder.wait(lambda document: document["addresses"], "an address")["addresses"][0]
        for kernel in KERNELS:
            worker = Daemon(
                self.founder.home.with_name(kernel),
                *("--join", address, "--ranks", "output,bulk"),
                *("--kernel", kernel, "--memory-mib", str(MEMORY_MIB)),
            )
            self.workers[kernel] = worker
            worker.start()
        self.founder.wait(self._is_served, "that all three workers hold everything", START_PATIENCE_S)

    def _is_served(self, document: dict[str, Any]) -> bool:
        coverage = document["plan"]["coverage"]
        serving = [each for each in document["members"] if each["holder_state"] == "serving"]
        return (
            document["state"] == "ready"
            and coverage["n_pairs_held"] == coverage["n_pairs"] > 0
            and coverage["by_backbone"] == 0
            and len(serving) == len(KERNELS)
        )

    def close(self) -> None:
        """Nothing is left of it."""
        for each in (*self.workers.values(), self.founder):
            each.end()

    def rows_of_workers(self) -> dict[Kernel, int]:
        """How many rows each has computed since it started."""
        return {
            kernel: worker.wait_state("ready")["engine_statistics"]["rows"]
            for kernel, worker in self.workers.items()
        }

    def compare(self, token_ids: tuple[int, ...], chunk_sizes: tuple[int, ...]) -> LogitsComparison:
        """The swarm's logits beside those of a single process that computes with ggml alone."""
        with tempfile.TemporaryDirectory(dir=self.founder.home.parent) as directory:
            ours, theirs = Path(directory, "swarm.npy"), Path(directory, "single.npy")
            trio.run(self._write, EvaluateRequest(token_ids, chunk_sizes, str(ours)), theirs)
            return compare_logits(open_logits(theirs), open_logits(ours), token_ids)

    async def _write(self, request: EvaluateRequest, theirs: Path) -> None:
        async with connect_daemon(self.founder.locations) as connection:
            with trio.fail_after(START_PATIENCE_S):
                reply = await connection.ask(request)
                assert isinstance(reply, EvaluateReply), reply
        locations = self.founder.locations
        home = app.open_home(locations, load_configuration(locations.config_file, {}))
        model = home.models.list()[0]
        settings = RunSettings(
            n_ctx=model.context_length(home.configuration.engine_context_tokens),
            n_ubatch=home.configuration.engine_ubatch_tokens,
            n_threads=1,
            device="none",
        )
        async with open_unwrapping_nursery() as nursery:
            engine, _ = await start_reference(nursery, model, settings, locations.runtime)
            await evaluate_logits(engine, request.token_ids, request.chunk_sizes, theirs)
            nursery.cancel_scope.cancel()


def held_out_tokens(n_tokens: int) -> tuple[int, ...]:
    """The first tokens of the held-out text, by the demo model's tokeniser."""
    import llama_cpp

    silence()
    data = DEMO_MODEL.with_name("held-out.txt").read_bytes()
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(bytes(DEMO_MODEL), parameters)
    tokens = (ctypes.c_int32 * len(data))()
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), tokens, len(tokens), False, False)
    llama_cpp.llama_model_free(model)
    assert count >= n_tokens, f"the held-out text has {count} tokens only"
    return tuple(tokens[:n_tokens])


def _pooled(windows: Sequence[LogitsComparison]) -> dict[str, float | int]:
    """Windows of equal length together."""
    n = len(windows)
    ratios = [each.mean_ln_ppl_ratio for each in windows if each.mean_ln_ppl_ratio is not None]
    return {
        "positions": sum(each.positions for each in windows),
        "mean_kld": sum(each.mean_kld for each in windows) / n,
        "maximum_kld": max(each.maximum_kld for each in windows),
        "top1_agreement": sum(each.top1_agreement for each in windows) / n,
        "borderline_positions": sum(each.borderline_positions for each in windows),
        "max_abs_delta": max(each.max_abs_delta for each in windows),
        "ln_perplexity_delta": sum(ratios) / n,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=4096)
    n_windows = -(-parser.parse_args().positions // WINDOW)
    reason = why_not()
    if reason:
        sys.exit(reason)
    tokens = held_out_tokens(n_windows * WINDOW)
    # What engines log goes elsewhere than the result.
    with tempfile.TemporaryDirectory(prefix="kvasir-") as directory, redirect_stdout(sys.stderr):
        swarm = MixedSwarm(Path(directory))
        try:
            windows = []
            for first in range(0, len(tokens), WINDOW):
                windows.append(swarm.compare(tokens[first : first + WINDOW], (WINDOW,)))
                sys.stderr.write(f"{len(windows)} of {n_windows}: mean KL {windows[-1].mean_kld:.1e}\n")
            rows = swarm.rows_of_workers()
        finally:
            swarm.close()
    sys.stdout.write(json.dumps({**_pooled(windows), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
