"""What reports say about a model: one form for status, demo, measurements and lists.

Kept in one place so that a field means the same wherever a program reads it.
"""

from __future__ import annotations

from typing import Any

from kvasir_node.model.store import StoredModel
from kvasir_proto.manifest import DIGEST_SIZE_BYTES


def model_report(model: StoredModel) -> dict[str, Any]:
    """The model's name and shape, as every report that names a model has them."""
    manifest = model.manifest
    return {
        "name": model.name,
        "digest": model.digest,
        "arch": manifest.architecture,
        "n_layer": manifest.n_layer,
        "n_moe_layer": len(manifest.moe_layers),
        "n_expert": manifest.n_expert,
        "n_expert_used": manifest.n_expert_used,
    }


def file_report(model: StoredModel) -> dict[str, Any]:
    """`model_report` and what there is on disk; sizes in bytes."""
    manifest = model.manifest
    missing = model.experts.missing(manifest, manifest.whole_shard())
    return model_report(model) | {
        "file_bytes": manifest.file_size_bytes,
        "expert_bytes": manifest.experts_size_bytes(),
        "backbone_bytes": manifest.trunk_size_bytes(),
        "source": None if model.source is None else str(model.source),
        "source_exists": model.has_source,
        "fetched_expert_bytes": manifest.shard_size_bytes(manifest.whole_shard())
        - sum(each.size_bytes for each in missing),
    }


def manifest_report(model: StoredModel) -> dict[str, Any]:
    """All that the manifest says; digests in hexadecimal, of a routed expert's tensor one each expert."""
    manifest = model.manifest
    return file_report(model) | {
        "n_embd": manifest.n_embd,
        "n_ff": manifest.n_ff,
        "n_vocab": manifest.n_vocab,
        "n_ctx_train": manifest.n_ctx_train,
        "moe_layers": list(manifest.moe_layers),
        "data_offset": manifest.data_offset,
        "header_sha256": manifest.header_sha256.hex(),
        "metadata_sha256": manifest.metadata_sha256.hex(),
        "hyper_parameters_sha256": manifest.hyper_parameters_sha256.hex(),
        "tokenizer_sha256": manifest.tokenizer_sha256.hex(),
        "template_sha256": manifest.template_sha256.hex(),
        "tensors": [
            {
                "name": each.name,
                "type": each.type.name,
                "shape": list(each.shape),
                "offset": each.offset,
                "size_bytes": each.size_bytes,
                "is_expert": each.is_expert,
                "sha256": [
                    each.digests[at : at + DIGEST_SIZE_BYTES].hex()
                    for at in range(0, len(each.digests), DIGEST_SIZE_BYTES)
                ],
            }
            for each in manifest.tensors
        ],
    }
