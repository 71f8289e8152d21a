"""What a backbone engine wrote into files for a measurement: logits, and what was seen inside.

Apart because the engines of a swarm of this process and those of a running daemon write the same files. It
refuses to know who asked.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvasir_node.backbone.traces import Rows, Traces, read_traces
from kvasir_node.measure.statistics import open_logits


def answers_in(path: Path, traces_path: Path | None) -> tuple[Rows, Traces | None]:
    """Both files' contents, in memory. Raises `EngineFailed` for files of anything else."""
    return np.array(open_logits(path)), None if traces_path is None else read_traces(traces_path)
