"""What an engine process does about itself before it serves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has a batch policy")
def test_an_engine_that_wakes_up_preempts_nobody() -> None:
    code = (
        "import os; from kvasir_node.engine.process import compute_in_batch; compute_in_batch(); "
        "print(os.sched_getscheduler(0) == os.SCHED_BATCH)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "True"
