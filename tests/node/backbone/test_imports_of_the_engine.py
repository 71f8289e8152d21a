"""What a backbone's engine does not import until it is used: each of it is memory of every backbone."""

import subprocess
import sys

_RARELY_USED = ("kvasir_node.backbone.row_audit", "kvasir_node.certification", "gguf", "libp2p", "trio")


def test_a_backbone_that_audits_nothing_does_not_pay_for_the_audit() -> None:
    script = (
        f"import sys, kvasir_node.engine.process, kvasir_node.backbone.engine\n"
        f"print([each for each in {_RARELY_USED!r} if each in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
