"""`demo`: the swarm on one machine, for people and for programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from kvasir_node.cli.generate import check_request
from kvasir_node.cli.output import json_option, note, print_json, print_table
from kvasir_node.cli.parameters import NumberRange
from kvasir_node.cli.session import CommandSession
from kvasir_node.cli.status import short_id
from kvasir_proto.errors import UsageError
from kvasir_proto.messages.local import GenerateRequest
from kvasir_proto.sampling import Sampling

KILL_WORKERS_MIN = 3
KILL_TOKENS_MIN = 3
MIXED_WORKERS_MIN = 3
LIAR_WORKERS_MIN = 2
LIES = ("f16", "scaled", "zeros", "stale", "wrong-expert", "nan", "q4", "replayed", "odd-blocks")
WORKERS_MAX = 16


@click.command()
@click.option("--workers", type=click.IntRange(1, WORKERS_MAX), default=3, show_default=True)
@click.option(
    "--tokens", type=click.IntRange(1, 400), default=64, show_default=True, help="Tokens to generate."
)
@click.option("--prompt", default="In the beginning", show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=7, show_default=True)
@click.option("--temperature", type=NumberRange(0, 100), default=0.8, show_default=True)
@click.option(
    "--kill-worker", is_flag=True, help="SIGKILL one holder in the middle; needs 3 workers or more."
)
@click.option(
    "--mixed",
    is_flag=True,
    help="Experts in F16, and one worker that adds in F16: bulk experts only, and a verdict by tolerance.",
)
@click.option(
    "--liar",
    type=click.Choice(LIES),
    help="One worker with this fault behind an honest node's word: the audit is to accuse it alone.",
)
@json_option
@click.pass_context
def demo(
    ctx: click.Context,
    workers: int,
    tokens: int,
    prompt: str,
    seed: int,
    temperature: float,
    kill_worker: bool,
    mixed: bool,
    liar: str | None,
    as_json: bool,
) -> None:
    """Run a real swarm on this machine: nodes that elect their backbone, over libp2p, with its own model.

    Then run the same in a single process and compare. Exit status 1 when they differ.
    """
    if kill_worker and workers < KILL_WORKERS_MIN:
        raise UsageError(
            f"--kill-worker needs --workers {KILL_WORKERS_MIN} or more: else nobody else holds its experts"
        )
    if kill_worker and tokens < KILL_TOKENS_MIN:
        raise UsageError(f"--kill-worker needs --tokens {KILL_TOKENS_MIN} or more: it kills in mid-text")
    if mixed and (kill_worker or workers < MIXED_WORKERS_MIN):
        raise UsageError(
            f"--mixed needs --workers {MIXED_WORKERS_MIN} or more, and no --kill-worker: each expert has one "
            "holder then"
        )
    if liar is not None and (kill_worker or mixed or workers < LIAR_WORKERS_MIN):
        raise UsageError(
            f"--liar needs --workers {LIAR_WORKERS_MIN} or more, and neither --kill-worker nor --mixed"
        )
    if not prompt:
        raise UsageError("--prompt is empty")
    sampling = Sampling(seed=seed, temperature=temperature)
    check_request(GenerateRequest(prompt, (), tokens, sampling))
    session: CommandSession = ctx.obj
    session.configure()
    from kvasir_node.demo import DemoOptions, DemoReporter, run_demo
    from kvasir_node.foreground import run_in_foreground
    from kvasir_node.working_directory import working_directory

    session.locations.prepare()
    f16_model = _f16_model(session) if mixed or liar == "f16" else None
    options = DemoOptions(workers, tokens, prompt, sampling, kill_worker, f16_model, liar)
    report = DemoReporter(
        say=note,
        show=_ignore_status if as_json else _show_swarm,
        text=_ignore_text if as_json else _write,
    )
    with working_directory(session.locations.cache, "demo") as directory:
        result = run_in_foreground(run_demo, options, directory, report)
    if as_json:
        print_json(result)
    else:
        _print_verdict(result)
    ctx.exit(0 if result["passed"] else 1)


def _f16_model(session: CommandSession) -> Path:
    """The demo model with its experts in F16, made when it is first needed."""
    from kvasir_node.model.f16_experts import write_f16_experts
    from kvasir_node.model.store import DEMO_MODEL

    path = session.locations.cache / f"{DEMO_MODEL.stem}-f16-experts.gguf"
    if not path.exists() or path.stat().st_mtime < DEMO_MODEL.stat().st_mtime:
        note("making the demo model's variant with experts in F16")
        write_f16_experts(DEMO_MODEL, path)
    return path


def _ignore_status(backbone: dict[str, Any], workers: list[dict[str, Any]]) -> None:
    return


def _ignore_text(piece: str) -> None:
    return


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _show_swarm(backbone: dict[str, Any], workers: list[dict[str, Any]]) -> None:
    model = backbone["model"]
    click.echo(
        f"\n{model['name']}: {model['arch']}, {model['n_layer']} layers, "
        f"{model['n_expert']} experts a layer, {model['n_expert_used']} used for each token\n"
    )
    n_experts = model["n_moe_layer"] * model["n_expert"]
    rows = [
        (
            role,
            short_id(each["node_id"]),
            each["engine"]["pid"],
            each["engine"]["backend"],
            each["accumulation"],
            _held_in_words(each, n_experts),
        )
        for role, each in [("backbone", backbone), *(("worker", each) for each in workers)]
    ]
    elected = f"{short_id(backbone['node_id'])} is the backbone of epoch {backbone['epoch']}"
    click.echo(f"{elected}, term {backbone['term']}, by {backbone['votes']} votes\n")
    print_table(("ROLE", "NODE", "PID", "BACKEND", "ACCUM", "HOLDS"), rows)
    click.echo()


def _held_in_words(document: dict[str, Any], n_experts: int) -> str:
    """What a node does for the swarm: the trunk, and how many experts of which ranks."""
    parts = ["attention, router, norms, head"] if "backbone" in document["ranks"] else []
    held = document["n_experts_held"]
    if held:
        ranks = " and ".join(each for each in document["ranks"] if each != "backbone")
        parts.append(f"{held} of {n_experts} experts, {ranks}")
    return "; ".join(parts) or "nothing"


def _print_tolerance(mixed: dict[str, Any], compared: dict[str, Any]) -> None:
    click.echo(
        f"{short_id(mixed['node'])} adds in F16: it computed {mixed['rows']} rows of experts, "
        f"{' and '.join(mixed['ranks'])} only.\n"
        f"Top tokens agree in {compared['top1_agreement']:.2%} of positions "
        f"({mixed['top1_agreement_min']:.2%} are required, give or take chance), "
        f"mean KL divergence is {compared['mean_kld']:.1e} ({mixed['mean_kld_max']:.1e} is allowed)."
    )
    if not mixed["in_comparison"]:
        click.echo("It had no part in the comparison: the plan took it for slow on this busy machine.")


def _print_audit(audit: dict[str, Any]) -> None:
    click.echo(f"{short_id(audit['planted'])} lies: {audit['fault']}.")
    for each in audit["accused"]:
        click.echo(
            f"{short_id(each['node'])} is {each['verdict']} after {each['rows_touching_fault']} rows that "
            f"the fault touched: {each['reason']}."
        )
    if not audit["accused"]:
        click.echo("NOBODY WAS ACCUSED.")


def _print_verdict(result: dict[str, Any]) -> None:
    mixed = result.get("mixed")
    by_tolerance = "equivalent" in result
    compared = result["equivalent"] if by_tolerance else result["exact"]
    another = "another text" if by_tolerance else "ANOTHER TEXT"
    same = "the same text" if result["same_tokens_as_single_process"] else another
    largest = f"largest logit difference {compared['max_abs_logit_delta']:.3g}"
    click.echo(
        f"\nAgainst a single process: {same}, {largest} over {compared['compared_positions']} positions."
    )
    if mixed:
        _print_tolerance(mixed, compared)
    rates = "one token is no rate"
    if result["tokens_per_second"] is not None:
        alone = result["single_process_tokens_per_second"]
        rates = f"{result['tokens_per_second']:.1f} tokens/s in the swarm, {alone:.1f} in the single process"
    click.echo(
        f"{rates}; "
        f"{result['experts_missing_total']} rows missing, {result['router']['worker_decisions']} routing "
        "decisions by workers."
    )
    if "killed_pid" in result:
        click.echo(
            f"The worker engine {result['killed_pid']} was killed on the way; "
            f"{result['rows_retried']} rows went to another holder."
        )
    if "audit" in result:
        _print_audit(result["audit"])
    click.echo("PASSED" if result["passed"] else "FAILED")
