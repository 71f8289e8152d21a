"""What reports say about a model: one form for status, demo, measurements and lists.

Kept in one place so that a field means the same wherever a program reads it.
"""

from __future__ import annotations

from typing import Any

from kvasir_node.model.store import StoredModel


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
    return model_report(model) | {
        "file_bytes": manifest.file_size_bytes,
        "expert_bytes": manifest.experts_size_bytes(),
        "backbone_bytes": manifest.trunk_size_bytes(),
        "source": str(model.source_path),
        "source_exists": model.source_path.exists(),
    }
