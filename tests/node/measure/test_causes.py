"""Each cause shows what it says: orders differ by last bits, short sums and rounded rows by far more."""

from __future__ import annotations

import pytest

from kvasir_node.measure.causes import measure_causes


@pytest.mark.slow
def test_every_cause_is_shown_with_the_code_that_ran() -> None:
    causes = {each.name: each for each in measure_causes()}
    assert len(causes) == 7
    for each in causes.values():
        assert each.code.startswith("def ")
        assert each.explanation.endswith(".")
        assert len(each.figures) >= 3
    of = {name: dict(each.figures) for name, each in causes.items()}
    order = of["Reduction order"]
    assert order["as a tree (numpy)"] < order["in 16 lanes"] < order["one by one"] < 1e-5
    assert 0 < of["Fused multiply-add"]["one beside the other"] < 1e-5
    sums = of["Accumulation"]
    assert sums["F32, 16 lanes"] < sums["F16 in blocks of 256, F32 across"] / 100
    assert sums["F16 in blocks of 256, F32 across"] < sums["F16, 16 lanes"] < sums["BF16, 16 lanes"]
    assert sums["F16: one less the cosine"] < 1e-4
    assert of["Transcendental functions"]["share of values that differ in F32"] > 0.01
    path = of["Dequantisation path"]
    assert path["expanded to F32, rows as they are"] < 1e-6 < path["expanded to F16, rows as they are"] < 1e-3
    assert (
        1e-3
        < path["rows rounded to Q8_0"]
        < path["rows rounded to Q8_K"]
        < path["Q8_0 rows beside Q8_K rows"]
    )
    assert of["Flips"]["after rounding to Q8_0"] > 100 * of["Flips"]["before rounding"]
    assert of["Nondeterminism"]["different results in 16 runs"] > 1
