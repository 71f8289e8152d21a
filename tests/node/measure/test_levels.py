"""The arithmetic of levels: intervals, drift, choices, continuations and cloze answers, by small examples."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.backbone.traces import Traces, joined_traces
from kvasir_node.measure.authority import disagreeing_decisions, first_difference, take_rows
from kvasir_node.measure.decisions import changed_experts, compare_choices, router_margins
from kvasir_node.measure.drift import compare_hidden, fit_growth
from kvasir_node.measure.generation import compare_continuations, first_divergence
from kvasir_node.measure.in_process import Continuation
from kvasir_node.measure.intervals import (
    blocks_of,
    bootstrap_interval,
    mean_error,
    mean_interval,
    share_interval,
)
from kvasir_node.measure.recording import Workload, chunks_of, cut_into_windows
from kvasir_node.measure.statistics import compare_logits
from kvasir_node.measure.task import (
    CLOZE_ITEMS,
    HELD_OUT_TEXT,
    ClozeItem,
    choice_score,
    cloze_score,
    compare_cloze,
    log_softmax,
    read_items,
)
from kvasir_proto.errors import EngineFailed, UsageError

# -- intervals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count, total, low, high",
    [(0, 100, 0.0, 0.0370), (100, 100, 0.9630, 1.0), (50, 100, 0.4038, 0.5962), (0, 0, 0.0, 1.0)],
)
def test_a_share_has_wilsons_interval(count: int, total: int, low: float, high: float) -> None:
    found = share_interval(count, total)
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


def test_a_means_error_is_what_llama_perplexity_prints() -> None:
    values = np.array([1.0, 2.0, 4.0])
    mean, square = 7 / 3, 21 / 3
    assert mean_error(values) == pytest.approx(math.sqrt((square - mean * mean) / 2))
    assert mean_error(values[:1]) == 0.0
    found = mean_interval(values)
    assert (found.low + found.high) / 2 == pytest.approx(mean)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12))
def test_blocks_cover_every_position_once(lengths: list[int]) -> None:
    covered = [index for each in blocks_of(lengths) for index in range(each.start, each.stop)]
    assert covered == list(range(sum(lengths)))


def test_a_bootstrap_covers_the_mean_as_often_as_it_says() -> None:
    draws = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        values = draws.standard_normal((400, 1)) + 3
        found = bootstrap_interval(lambda sums: sums[:, 0] / sums[:, 1], values, blocks_of([20] * 20))
        hits += found.low <= 3 <= found.high
    assert 175 <= hits <= 199


# -- logits over windows ---------------------------------------------------------------------------------


def test_the_last_position_of_a_window_predicts_nothing() -> None:
    draws = np.random.default_rng(1)
    base = draws.standard_normal((5, 7)).astype(np.float32)
    run = (base + draws.standard_normal((5, 7)) / 10).astype(np.float32)
    tokens = [1, 2, 3, 4, 5]
    found = compare_logits(base, run, tokens, [2, 3])
    base_p, run_p = log_softmax(base), log_softmax(run)
    pairs = [(0, 2), (2, 4), (3, 5)]
    ratio = [base_p[at, token] - run_p[at, token] for at, token in pairs]
    assert found.mean_ln_ppl_ratio == pytest.approx(np.mean(ratio))
    assert found.base_perplexity == pytest.approx(math.exp(-np.mean([base_p[at] for at in pairs])))
    assert found.perplexity_change == pytest.approx(math.expm1(np.mean(ratio)))
    with pytest.raises(EngineFailed, match="windows of 4 positions"):
        compare_logits(base, run, tokens, [2, 2])


# -- drift -----------------------------------------------------------------------------------------------


def traces(hidden: np.ndarray, router: np.ndarray, n_used: int = 2) -> Traces:
    """Traces of a model whose routers take the best of what they say."""
    experts = np.argsort(-router, axis=2)[:, :, :n_used].astype(np.int32)
    layers = tuple(range(len(hidden)))
    return Traces(layers, layers, hidden.astype(np.float32), router.astype(np.float32), experts)


def example(seed: int = 3) -> Traces:
    draws = np.random.default_rng(seed)
    return traces(draws.standard_normal((3, 20, 8)), draws.standard_normal((3, 20, 6)))


def test_equal_runs_do_not_drift() -> None:
    found = compare_hidden(example(), example())
    assert [each.rel_l2 for each in found.layers] == [0.0, 0.0, 0.0]
    assert [each.undisturbed for each in found.layers] == [20, 20, 20]
    assert (found.best, found.as_root, found.as_layers) == (None, None, None)


def test_positions_with_an_exchanged_expert_are_apart_from_that_layer_on() -> None:
    base = example()
    router, hidden = base.router.copy(), base.hidden.copy()
    router[1, 4] = -router[1, 4]
    hidden[1:, 4] += 100
    hidden[:, 0] *= 1.001
    found = compare_hidden(base, traces(hidden, router)).layers
    assert [each.undisturbed for each in found] == [20, 19, 19]
    assert found[1].rel_l2 > 1
    assert found[1].undisturbed_rel_l2 is not None
    assert found[1].undisturbed_rel_l2 < 1e-3
    assert found[0].rel_l2 == pytest.approx(found[0].undisturbed_rel_l2)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_a_law_of_growth_is_found(exponent: float) -> None:
    errors = [3e-5 * (layer + 1) ** exponent for layer in range(6)]
    best = fit_growth(errors)
    assert best is not None
    assert best.exponent == pytest.approx(exponent)
    assert best.factor == pytest.approx(3e-5)
    assert best.residual == pytest.approx(0, abs=1e-12)
    for law in (0.5, 1.0):
        fitted = fit_growth(errors, law)
        assert fitted is not None
        assert (fitted.residual < 1e-9) == (law == exponent)
    assert fit_growth([0.0, 1e-5, 0.0]) is None


def test_two_models_are_not_compared() -> None:
    other = traces(np.zeros((2, 20, 8)), np.zeros((2, 20, 6)))
    with pytest.raises(EngineFailed):
        compare_hidden(example(), other)
    with pytest.raises(EngineFailed):
        compare_choices(example(), other)


# -- decisions -------------------------------------------------------------------------------------------


def test_margins_are_between_the_last_expert_taken_and_the_next() -> None:
    probabilities = np.array([[0.5, 0.2, 0.199995, 0.100005], [0.25, 0.25, 0.25, 0.25]])
    logits = np.log(probabilities).astype(np.float32)
    found = router_margins(logits, 2)
    assert found[0] == pytest.approx(5e-6, rel=0.05)
    assert found[1] == pytest.approx(0, abs=1e-8)
    assert router_margins(logits, 4).tolist() == [math.inf, math.inf]


def test_the_order_of_experts_is_no_difference() -> None:
    ours, theirs = np.array([[1, 2], [1, 2]], np.int32), np.array([[2, 1], [2, 3]], np.int32)
    assert changed_experts(ours, theirs).tolist() == [0, 1]


def test_choices_are_counted_by_layer_and_by_token() -> None:
    base = example()
    router = base.router.copy()
    router[0, 3] = -router[0, 3]
    router[2, 3] = -router[2, 3]
    router[2, 9] = -router[2, 9]
    found = compare_choices(base, traces(base.hidden, router))
    assert [each.disagreeing for each in found.layers] == [1, 0, 2]
    assert (found.decisions, found.decisions_disagreeing) == (60, 3)
    assert (found.tokens_disagreeing, found.first_disagreement) == (2, 3)
    assert found.disagreement == pytest.approx(0.05)
    assert found.disagreement_95.low < 0.05 < found.disagreement_95.high
    assert found.layers[0].largest_margin == pytest.approx(router_margins(base.router[0], 2)[3])
    same = compare_choices(base, base)
    assert (same.decisions_disagreeing, same.first_disagreement) == (0, None)


def test_borderline_tokens_are_those_that_last_bits_decide() -> None:
    probabilities = np.array(
        [[[0.4, 0.30002, 0.29998], [0.4, 0.3, 0.3], [0.5, 0.3, 0.2], [0.4, 0.3001, 0.2999]]]
    )
    base = traces(np.zeros((1, 4, 2)), np.log(probabilities))
    router = base.router.copy()
    router[0, 1] = router[0, 1][[0, 2, 1]] + np.array([0, -1e-3, 1e-3])
    found = compare_choices(base, traces(base.hidden, router))
    assert (found.layers[0].borderline, found.layers[0].borderline_disagreeing) == (2, 1)
    assert found.tokens_borderline == 2


# -- authority -------------------------------------------------------------------------------------------


def test_a_row_that_the_others_router_did_not_choose_is_missing() -> None:
    experts, other = np.array([[0, 1], [0, 2]], np.int32), np.array([[1, 0], [3, 0]], np.int32)
    held, other_held = np.isin(experts, [0]), np.isin(other, [1, 2, 3])
    rows = np.where(held[:, :, None], experts[:, :, None] + 10.0, 0).astype(np.float32)
    other_rows = np.where(other_held[:, :, None], other[:, :, None] + 100.0, 0).astype(np.float32)
    found, missing = take_rows(experts, held, rows, other, other_held, other_rows)
    assert found[:, :, 0].tolist() == [[10.0, 101.0], [10.0, 0.0]]
    assert missing == 1
    nobody = np.zeros_like(held)
    assert take_rows(experts, nobody, rows, experts, nobody, rows)[1] == 4, (
        "chosen by both and held by neither"
    )


def test_what_was_computed_is_held_against_what_the_router_chose() -> None:
    seen = example()
    computed = {layer: seen.experts[layer][:, ::-1].copy() for layer in seen.moe_layers}
    assert disagreeing_decisions(seen, computed) == 0
    computed[1][7] = -1
    assert disagreeing_decisions(seen, computed) == 1
    del computed[2]
    assert disagreeing_decisions(seen, computed) == 1 + 20


def test_the_first_other_token_is_the_first_other_maximum() -> None:
    base = np.eye(4, dtype=np.float32)
    run = base.copy()
    assert first_difference(base, run) is None
    run[2] = [9, 0, 1, 0]
    assert first_difference(base, run) == 2


# -- generation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "base, run, first, agreement",
    [
        ((1, 2, 3), (1, 2, 3), None, 1.0),
        ((1, 2, 3), (1, 9, 3), 1, 1 / 3),
        ((1, 2), (1, 2, 3, 4), 2, 0.5),
        ((), (), None, 1.0),
        ((), (5,), 0, 0.0),
    ],
)
def test_texts_part_where_a_token_differs_or_one_ends(
    base: tuple[int, ...], run: tuple[int, ...], first: int | None, agreement: float
) -> None:
    found = first_divergence(Continuation(base, tuple(0.5 for _ in base)), Continuation(run))
    assert found.first == first
    assert found.agreement == pytest.approx(agreement)
    assert found.margin == (0.5 if first is not None and first < len(base) else None)


def test_continuations_are_summed_up() -> None:
    found = compare_continuations(
        [Continuation((1, 2)), Continuation((1, 2))], [Continuation((1, 2)), Continuation((1, 3))]
    )
    assert (found.identical, found.identical_share, found.mean_agreement) == (1, 0.5, 0.75)
    assert (found.median_first_divergence, found.earliest_divergence) == (1, 1)
    assert found.identical_95.low < 0.5 < found.identical_95.high


# -- task ------------------------------------------------------------------------------------------------

ITEM = ClozeItem("the cat sat on the", ("moon", "mat"), 1)


def test_a_word_of_several_tokens_is_as_likely_as_all_of_them() -> None:
    log_p = np.log(np.array([[0.5, 0.5], [0.1, 0.9], [0.75, 0.25]]))
    assert choice_score(log_p, 2, (1, 0)) == pytest.approx(math.log(0.9 * 0.75))


def test_cloze_answers_are_the_most_likely_words() -> None:
    found = cloze_score([ITEM, ITEM], [(-3.0, -1.0), (-1.0, -1.0)])
    assert (found.right, found.share) == (1, 0.5)
    assert found.mean_confidence == pytest.approx((1 / (1 + math.exp(-2)) + 0.5) / 2)
    both = compare_cloze([ITEM, ITEM], [(-3.0, -1.0), (-1.0, -2.0)], [(-3.0, -1.0), (-2.0, -1.0)])
    assert (both.delta, both.answers_changed) == (0.5, 1)
    unchanged = compare_cloze([ITEM, ITEM], [(-3.0, -1.0)] * 2, [(-3.0, -1.0)] * 2)
    assert unchanged.delta_95.low < 0 < unchanged.delta_95.high


def test_what_ships_is_enough_and_is_read_evenly() -> None:
    items = read_items()
    assert len(items) >= 500
    assert len({each.context for each in items}) == len(items)
    assert all(len(set(each.choices)) == 4 for each in items)
    few = read_items(n_items=4)
    assert [items.index(each) for each in few] == [0, 160, 320, 480]
    answers = [each.answer for each in items]
    assert max(answers.count(place) for place in range(4)) < len(items) // 3
    assert HELD_OUT_TEXT.stat().st_size > 4096 * 4
    assert CLOZE_ITEMS.stat().st_size < 1 << 20


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        json.dumps({"context": "a", "choices": ["b"], "answer": 0}),
        json.dumps({"context": "", "choices": ["b", "c"], "answer": 0}),
        json.dumps({"context": "a", "choices": ["b", "c"], "answer": 2}),
        json.dumps({"context": "a", "choices": ["b", 1], "answer": 0}),
    ],
)
def test_other_items_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "items"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match="line 1"):
        read_items(path)
    with pytest.raises(UsageError):
        read_items(tmp_path / "absent")


# -- workloads -------------------------------------------------------------------------------------------


def test_windows_cover_the_positions_that_are_wanted() -> None:
    tokens = tuple(range(20))
    assert cut_into_windows(tokens, 12, 5) == (tokens[:5], tokens[5:10], tokens[10:12])
    assert cut_into_windows(tokens, 11, 5) == (tokens[:5], tokens[5:10])
    with pytest.raises(UsageError, match="has 20 tokens"):
        cut_into_windows(tokens, 21, 5)


@pytest.mark.parametrize(
    "n, singly, expected", [(5, 2, (3, 1, 1)), (2, 9, (1, 1)), (1, 3, (1,)), (4, 0, (4,))]
)
def test_the_last_tokens_go_singly(n: int, singly: int, expected: tuple[int, ...]) -> None:
    assert chunks_of(n, singly) == expected


def test_a_workload_knows_its_items() -> None:
    first = Workload("d", ((1, 2), (3, 4, 5)), 1, items=(ITEM,))
    other = Workload("d", ((1, 2),), 1, items=(ClozeItem(ITEM.context, ITEM.choices, 0),))
    assert (first.tokens, first.lengths) == ((1, 2, 3, 4, 5), (2, 3))
    assert first.items_digest != other.items_digest


def test_traces_of_windows_are_put_one_behind_the_other() -> None:
    both = joined_traces([example(1), example(2)])
    assert both.hidden.shape == (3, 40, 8)
    assert (both.experts[:, 20:] == example(2).experts).all()
