"""How things stand for the gateway: by what this node knows, whether text can be had, and whose it would be.

Decides what keeps a request from being tried at all, in the words that `status` has for it. A node's own part
in the swarm does not matter to those who ask here: while its kernels are measured or its experts load,
another node's backbone may serve. A plain function; sessions, HTTP and clocks are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvasir_node.driver.status_report import StatusSources, certificate_of_swarm
from kvasir_node.gateway.ports import Provenance, ServedModel, Standing
from kvasir_node.tokenizer.vocabulary import Vocabulary

_SERVING: Final = ("ready", "degraded")
_OUTSIDE: Final = ("starting", "joining", "electing", "isolated", "conflicted", "revoked", "stopping")
"""States of a node that knows no backbone to ask."""


@dataclass(frozen=True, slots=True)
class ReadModel:
    """What was read of the model for the gateway. ``created`` is in seconds of Unix time."""

    vocabulary: Vocabulary
    context_tokens: int
    created: int


def standing_of(sources: StatusSources, model: ReadModel | None, why_no_model: str) -> Standing:
    """How things stand. ``model`` is None while it is not read, ``why_no_model`` says why."""
    obstacle = _obstacle(sources)
    if model is None and not obstacle:
        obstacle = why_no_model or "the model's vocabulary is being read"
    return Standing(_served(sources, model), _provenance(sources), obstacle)


def _served(sources: StatusSources, model: ReadModel | None) -> ServedModel | None:
    if model is None or sources.swarm is None:
        return None
    manifest, vocabulary = sources.swarm.manifest, model.vocabulary
    return ServedModel(
        name=manifest.model_name,
        digest=manifest.model_digest.hex(),
        created=model.created,
        context_tokens=model.context_tokens,
        vocabulary_size=vocabulary.n_tokens,
        stop_token_ids=vocabulary.stop_token_ids,
        chat_template=vocabulary.chat_template,
        first_text=vocabulary.first_text,
        last_text=vocabulary.last_text,
    )


def _provenance(sources: StatusSources) -> Provenance | None:
    fence = sources.view.fence if sources.view is not None else None
    if sources.swarm is None or fence is None:
        return None
    return Provenance(sources.swarm.digest.hex(), fence.epoch, fence.term, certificate_of_swarm(sources))


def _obstacle(sources: StatusSources) -> str:
    view = sources.view
    own = f"this node is {sources.state}" + (f": {sources.reason}" if sources.reason else "")
    if view is None or view.fence is None:
        return own
    backbone = view.fence.backbone
    if backbone == sources.node_id:
        return "" if sources.state in _SERVING else own
    if sources.state in _OUTSIDE:
        return own
    record = sources.record_of(backbone)
    if record is None or record.state in _SERVING:
        return ""
    return f"the backbone is {record.state}" + (f": {record.reason}" if record.reason else "")
