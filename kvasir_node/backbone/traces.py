"""What is seen inside a run: the hidden state behind each layer, what routers say and choose, what is asked.

Decides which values of llama.cpp's graph those are, and how they are kept in a file for whoever asked an
engine for them. Apart from the trunk because only measurements look inside, from the measurements because a
swarm's backbone engine looks too. It refuses to compare.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.graph_watch import GraphWatch, Values
from kvasir_node.backbone.hook import LayerCall
from kvasir_node.kernels.addressed_arrays import array_at
from kvasir_proto.errors import EngineFailed

Rows = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int32]

_HIDDEN: Final = "l_out"
_ROUTER: Final = "ffn_moe_logits"
_EXPERTS: Final = "ffn_moe_topk"
_WATCHED: Final = re.compile(rf"({_HIDDEN}|{_ROUTER}|{_EXPERTS})-(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Traces:
    """What was seen inside: `hidden` [layers, positions, n_embd] behind each of `layers`, `router` [MoE
    layers, positions, n_expert] before its softmax, `experts` [MoE layers, positions, n_used] as chosen.
    `asked` are the experts whose rows were asked for through the hook, like `experts`; None without a hook.
    """

    layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    hidden: Rows
    router: Rows
    experts: Numbers
    asked: Numbers | None = None


def joined_traces(traces: Sequence[Traces]) -> Traces:
    """The traces of several windows, one after the other; there is one at least."""
    asked = [each.asked for each in traces if each.asked is not None]
    return Traces(
        traces[0].layers,
        traces[0].moe_layers,
        np.concatenate([each.hidden for each in traces], axis=1),
        np.concatenate([each.router for each in traces], axis=1),
        np.concatenate([each.experts for each in traces], axis=1),
        np.concatenate(asked, axis=1) if len(asked) == len(traces) else None,
    )


class TraceRecorder:
    """Looks at one context's graph. Give `watch` to its trunk, and show it the hook's calls with `note`."""

    def __init__(self) -> None:
        self.watch = GraphWatch(self._wants, self._take)
        self._seen: dict[tuple[str, int], list[Values]] = {}
        self._asked: dict[int, list[Numbers]] = {}

    def clear(self) -> None:
        """Forget what was seen."""
        self._seen.clear()
        self._asked.clear()

    def note(self, call: LayerCall) -> None:
        """Keep which experts a layer call asks for."""
        ids = array_at(call.ids_address, np.int32, call.n_tokens, call.n_slots)
        self._asked.setdefault(call.layer, []).append(np.array(ids))

    def require_seen(self) -> None:
        """Raise `EngineFailed` when a value could not be read."""
        if self.watch.failure is not None:
            raise EngineFailed(f"what llama.cpp computed could not be read: {self.watch.failure}")

    def traces(self, n_positions: int) -> Traces:
        """Everything since `clear`. Raises `EngineFailed` unless it was of so many positions."""
        layers = tuple(sorted(layer for kind, layer in self._seen if kind == _HIDDEN))
        moe_layers = tuple(sorted(layer for kind, layer in self._seen if kind == _EXPERTS))

        def stacked(kind: str, where: Sequence[int], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
            parts = [np.concatenate(self._seen[kind, layer]) for layer in where]
            if any(len(part) != n_positions for part in parts):
                raise EngineFailed(f"{kind} was not computed for every position")
            return np.stack(parts) if parts else np.zeros((0, n_positions, 0), dtype)

        asked = [np.concatenate(self._asked[layer]) for layer in moe_layers if layer in self._asked]
        is_whole = bool(asked) and len(asked) == len(moe_layers)
        if is_whole and any(len(each) != n_positions for each in asked):
            raise EngineFailed("experts were not asked for exactly once for every position")
        return Traces(
            layers=layers,
            moe_layers=moe_layers,
            hidden=stacked(_HIDDEN, layers, np.float32).astype(np.float32, copy=False),
            router=stacked(_ROUTER, moe_layers, np.float32).astype(np.float32, copy=False),
            experts=stacked(_EXPERTS, moe_layers, np.int32).astype(np.int32, copy=False),
            asked=np.stack(asked) if is_whole else None,
        )

    def _wants(self, name: str) -> bool:
        return _WATCHED.fullmatch(name) is not None

    def _take(self, name: str, values: Values) -> None:
        match = _WATCHED.fullmatch(name)
        if match is not None:
            self._seen.setdefault((match[1], int(match[2])), []).append(values)


def write_traces(path: Path, traces: Traces) -> None:
    """Keep traces in a file that `read_traces` reads. Raises `OSError`."""
    arrays = {name: getattr(traces, name) for name in ("hidden", "router", "experts")}
    if traces.asked is not None:
        arrays["asked"] = traces.asked
    with path.open("wb") as file:
        np.savez(file, layers=np.array(traces.layers), moe_layers=np.array(traces.moe_layers), **arrays)


def read_traces(path: Path) -> Traces:
    """Those of a file that `write_traces` wrote. Raises `EngineFailed` for any other."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return Traces(
                layers=tuple(file["layers"].tolist()),
                moe_layers=tuple(file["moe_layers"].tolist()),
                hidden=file["hidden"],
                router=file["router"],
                experts=file["experts"],
                asked=file.get("asked"),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise EngineFailed(f"{path.name} does not hold what was seen inside: {error}") from error
