"""`generate`: text from the running swarm, as it comes."""

from __future__ import annotations

import json
import secrets
import sys
from typing import Final

import click
import trio

from kvasir_node.cli.output import json_option, print_json
from kvasir_node.cli.parameters import NumberRange
from kvasir_node.cli.session import CommandSession
from kvasir_node.control import collect_text, connect_daemon
from kvasir_proto.codec import encode
from kvasir_proto.errors import LocalProtocolError, UsageError, error_of_session
from kvasir_proto.limits import TOP_K_MAX
from kvasir_proto.messages.local import GenerateRequest
from kvasir_proto.sampling import Sampling


def parse_token_ids(text: str | None) -> tuple[int, ...]:
    """Token ids from a comma-separated list. Raises `UsageError`."""
    if not text:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"--token-ids takes numbers separated by commas, not {text!r}")
    ids = tuple(int(part) for part in parts)
    if any(not 0 <= each < 2**31 for each in ids):
        raise UsageError("--token-ids takes numbers from 0 to 2147483647")
    return ids


def check_request(request: GenerateRequest) -> None:
    """Raise `UsageError` for a request that cannot be sent: text that is no UTF-8, a number out of bounds."""
    try:
        (request.prompt or "").encode()
    except UnicodeEncodeError:
        raise UsageError("the prompt is not text in UTF-8") from None
    try:
        encode(request)
    except LocalProtocolError as error:
        raise UsageError(error.reason) from error


_DEFAULT: Final = Sampling()


@click.command(context_settings={"show_default": True})
@click.argument("prompt", required=False)
@click.option("--token-ids", help="The prompt as token ids, comma-separated, instead of text.")
@click.option("--tokens", "n_tokens", type=click.IntRange(1, 262_144), default=128)
@click.option("--temperature", type=NumberRange(0, 100), default=_DEFAULT.temperature, help="0: greedy.")
@click.option("--top-k", type=click.IntRange(0, TOP_K_MAX), default=_DEFAULT.top_k, help="0 switches it off.")
@click.option("--top-p", type=NumberRange(0, 1), default=_DEFAULT.top_p, help="1 switches it off.")
@click.option("--min-p", type=NumberRange(0, 1), default=_DEFAULT.min_p, help="0 switches it off.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Same seed, same text. Default: random.")
@json_option
@click.pass_obj
def generate(
    session: CommandSession,
    prompt: str | None,
    token_ids: str | None,
    n_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    as_json: bool,
) -> None:
    """Generate text after PROMPT on the running swarm. PROMPT "-" reads standard input."""
    session.configure()
    if (prompt is None) == (token_ids is None):
        raise UsageError("give either PROMPT or --token-ids")
    if prompt == "-":
        # As Python reads arguments: bytes that are no UTF-8 are refused below, in the same words.
        prompt = sys.stdin.buffer.read().decode(errors="surrogateescape")
    ids = parse_token_ids(token_ids)
    if not prompt and not ids:
        raise UsageError("the prompt is empty")
    request = GenerateRequest(
        prompt=prompt,
        token_ids=ids,
        n_tokens=n_tokens,
        sampling=Sampling(
            seed=secrets.randbits(63) if seed is None else seed,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        ),
    )
    check_request(request)
    trio.run(_generate, session, request, as_json)


async def _generate(session: CommandSession, request: GenerateRequest, as_json: bool) -> None:
    async with connect_daemon(session.locations) as connection:
        tokens, text, end = await collect_text(connection, request, None if as_json else _write)
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "text": text,
                "token_ids": tokens,
                "seed": request.sampling.seed,
                "reason": end.reason,
                **json.loads(end.statistics),
            }
        )
    elif text or end.reason != "failed":
        click.echo()
    if end.reason == "failed":
        raise error_of_session(end.code, end.detail)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
