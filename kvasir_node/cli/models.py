"""`models`: what this home has of which models, taking them in, fetching their experts, letting them go."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import click

from kvasir_node.backbone.trial import try_backbone_file
from kvasir_node.cli.output import (
    json_option,
    note,
    print_fields,
    print_json,
    print_table,
    progress_on_stderr,
)
from kvasir_node.cli.parameters import NonEmptyPath
from kvasir_node.cli.session import CommandSession
from kvasir_node.config import Configuration
from kvasir_node.home_lock import HomeLock
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.expert_cache import ExpertCache
from kvasir_node.model.expert_files import slices_of
from kvasir_node.model.gguf_writer import new_file
from kvasir_node.model.manifest_file import read_manifest_of_others
from kvasir_node.model.model_url import ModelUrl, location_of
from kvasir_node.model.report import file_report, manifest_report
from kvasir_node.model.store import ModelStore, StoredModel
from kvasir_proto.errors import UsageError
from kvasir_proto.limits import as_sentence
from kvasir_proto.manifest import ShardSet


def _mebibytes(count: object) -> str:
    return f"{int(str(count)) / 2**20:.1f} MiB"


@click.group()
def models() -> None:
    """The models of this home."""


@models.command("add")
@click.argument("file", type=NonEmptyPath(path_type=Path))
@json_option
@click.pass_obj
def add_model(session: CommandSession, file: Path, as_json: bool) -> None:
    """Take the GGUF FILE in: check it, hash every expert, write the backbone file, let llama.cpp judge it.

    The file stays where it is; workers of this home read their experts from it. Of a model in several files
    give the first.
    """
    session.configure()
    session.locations.prepare()
    with progress_on_stderr("hashing") as progress:
        model = ModelStore(session.locations.models).add(file, progress, try_backbone_file)
    _print_taken(model, as_json)


@models.command("pull")
@click.argument("url")
@click.option(
    "--manifest",
    "manifest_file",
    type=NonEmptyPath(path_type=Path),
    help="A manifest that 'models show --save' wrote: only the backbone's part is fetched now.",
)
@click.option("--no-experts", is_flag=True, help="Read the experts for their digests and keep none.")
@json_option
@click.pass_obj
def pull_model(
    session: CommandSession, url: str, manifest_file: Path | None, no_experts: bool, as_json: bool
) -> None:
    """Take in the GGUF file at URL (http or https), whose server must give ranges.

    All of it is read once: the backbone file is written and every expert hashed as the bytes pass. Experts
    are kept where all of them have room, on the disk and beside what 'models.cache_mib' allows. Of a model in
    several files give the first.
    """
    cache = _cache_of(session, session.configure())
    session.locations.prepare()
    manifest = None if manifest_file is None else read_manifest_of_others(manifest_file)
    with progress_on_stderr("fetching", shows_rate=True) as progress:
        model = ModelStore(session.locations.models).pull(
            ModelUrl(url),
            progress,
            try_backbone_file,
            manifest=manifest,
            experts_bytes_max=0 if no_experts else cache.room_bytes(),
        )
    if not no_experts and manifest is None and not file_report(model)["fetched_expert_bytes"]:
        note("no experts are here: a daemon fetches those of its plan, and 'models shard' fetches them ahead")
    _print_taken(model, as_json)


@models.command("show")
@click.argument("name")
@click.option(
    "--save",
    "destination",
    type=NonEmptyPath(path_type=Path),
    help="Write the manifest to this file, for 'models pull --manifest' elsewhere.",
)
@json_option
@click.pass_obj
def show_model(session: CommandSession, name: str, destination: Path | None, as_json: bool) -> None:
    """Show the manifest of the model NAME (or of this digest); with --json every tensor, range and digest."""
    session.configure()
    model = ModelStore(session.locations.models).get(name)
    if destination is not None:
        with new_file(destination) as file:
            file.write(model.manifest.encode())
    report = manifest_report(model)
    if as_json:
        print_json({"schema_version": 1, "model": report})
        return
    tensors = report["tensors"]
    experts = (
        f"{report['n_expert']} ({report['n_expert_used']} used) of width {report['n_ff']} in "
        f"{report['n_moe_layer']} layers, {_mebibytes(report['expert_bytes'])}, "
        f"{_mebibytes(report['fetched_expert_bytes'])} of them fetched"
    )
    print_fields(
        (
            ("name", report["name"]),
            ("digest", report["digest"]),
            ("form", f"{report['arch']}, {report['n_layer']} layers of width {report['n_embd']}"),
            ("experts", experts),
            ("backbone", _mebibytes(report["backbone_bytes"])),
            ("tensors", f"{len(tensors)}, {sum(len(each['sha256']) for each in tensors)} digests"),
            ("tokenizer", report["tokenizer_sha256"]),
            ("template", report["template_sha256"]),
            ("source", report["source"] + ("" if report["source_exists"] else " (gone)")),
        )
    )


@models.command("shard")
@click.argument("name")
@click.argument("shard", metavar="SHARD...", nargs=-1, required=True)
@click.option(
    "--from",
    "others",
    multiple=True,
    metavar="LOCATION",
    help="Another file or address to try where the model's own fails; may be given several times.",
)
@click.option("--check", is_flag=True, help="Compare what is there with its digests before.")
@json_option
@click.pass_obj
def fetch_shard(
    session: CommandSession,
    name: str,
    shard: tuple[str, ...],
    others: tuple[str, ...],
    check: bool,
    as_json: bool,
) -> None:
    """Fetch experts of the model NAME, which came from an address: their ranges and no more.

    SHARD is LAYERS or LAYERS:EXPERTS, each a number or a range such as 0-3; several are added up. A daemon
    fetches what its plan gives it by itself; this is for fetching ahead. What was begun is gone on with.
    """
    cache = _cache_of(session, session.configure())
    model = ModelStore(session.locations.models).get(name)
    wanted = _shard_of(model, shard)
    with progress_on_stderr("fetching", shows_rate=True) as progress:
        cache.ensure(model, wanted, progress, others=[location_of(each) for each in others], is_damaged=check)
    report = {
        "n_experts": len(wanted),
        "shard_bytes": model.manifest.shard_size_bytes(wanted),
        "directory": str(model.source_path),
    }
    if as_json:
        print_json({"schema_version": 1, "shard": report})
        return
    click.echo(f"{len(wanted)} experts, {_mebibytes(report['shard_bytes'])}, in {model.source_path}")


@models.command("verify")
@click.argument("name")
@json_option
@click.pass_obj
def verify_model(session: CommandSession, name: str, as_json: bool) -> None:
    """Compare every byte that is here of the model NAME with its digests.

    A damaged backbone file is made again. Fetched experts that are damaged are removed, and fetched again
    when they are needed. Ends with 7 where the model's own file is damaged.
    """
    session.configure()
    model = ModelStore(session.locations.models).get(name)
    manifest = model.manifest
    if model.source is not None:
        with progress_on_stderr("backbone") as progress:
            model.verified_backbone_path(progress)
    damaged = model.experts.damaged(manifest, manifest.whole_shard())
    for each in damaged:
        model.experts.remove(each)
    if isinstance(model.source, Path):
        with ExpertSource(model.source, manifest) as source, progress_on_stderr("experts") as progress:
            slices = slices_of(manifest, manifest.whole_shard())
            for done, each in enumerate(slices, 1):
                source.read(each.tensor.name, each.expert)
                progress(done, len(slices))
    report = file_report(model) | {"damaged_experts": [str(each) for each in damaged]}
    if as_json:
        print_json({"schema_version": 1, "model": report})
        return
    for each in damaged:
        click.echo(f"{each} was damaged and is removed")
    click.echo(f"{model.name}  {model.digest}  as its manifest says")


@models.command("rm")
@click.argument("name")
@click.option("--experts", is_flag=True, help="Remove only the experts that were fetched and nobody serves.")
@click.pass_obj
def remove_model(session: CommandSession, name: str, experts: bool) -> None:
    """Remove what this home has of the model NAME: never the user's own file.

    Without --experts no daemon may run in this home.
    """
    cache = _cache_of(session, session.configure())
    store = ModelStore(session.locations.models)
    model = store.get(name)
    if experts:
        click.echo(f"{_mebibytes(cache.remove_unused(model))} of experts removed")
        return
    with HomeLock(session.locations.lock_file):
        store.remove(model)
    click.echo(f"{model.name} removed")


def _cache_of(session: CommandSession, configuration: Configuration) -> ExpertCache:
    return ExpertCache(session.locations.models, configuration.models_cache_bytes)


_SHARD: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?(?::(\d{1,6})(?:-(\d{1,6}))?)?", re.ASCII)


def _shard_of(model: StoredModel, texts: tuple[str, ...]) -> ShardSet:
    """The experts that were named; ranges include both ends. Raises `UsageError`."""
    manifest = model.manifest
    ranges = []
    for text in texts:
        match = _SHARD.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not LAYERS or LAYERS:EXPERTS, such as 3, 0-3 or 0-3:16-31")
        first, last = int(match[1]), int(match[2] or match[1])
        begin = int(match[3]) if match[3] else 0
        end = int(match[4] or match[3]) + 1 if match[3] else manifest.n_expert
        layers = [each for each in manifest.moe_layers if first <= each <= last]
        if not layers or last >= manifest.n_layer or not begin < end <= manifest.n_expert:
            raise UsageError(
                f"{text} names no experts: layers {manifest.moe_layers[0]} to {manifest.moe_layers[-1]} have "
                f"some, each 0 to {manifest.n_expert - 1}"
            )
        ranges += [(layer, begin, end) for layer in layers]
    return ShardSet.from_ranges(ranges)


def _print_taken(model: StoredModel, as_json: bool) -> None:
    described = file_report(model)
    if as_json:
        print_json({"schema_version": 1, "model": described})
        return
    click.echo(f"{model.name}  {model.digest}")
    click.echo(
        f"{described['arch']}, {described['n_layer']} layers, {described['n_expert']} experts "
        f"({described['n_expert_used']} used), experts {_mebibytes(described['expert_bytes'])}, "
        f"backbone {_mebibytes(described['backbone_bytes'])}"
    )


@models.command("list")
@json_option
@click.pass_obj
def list_models(session: CommandSession, as_json: bool) -> None:
    """List the models of this home."""
    session.configure()
    usable, damage = ModelStore(session.locations.models).list_with_damage()
    for sentence in damage:
        note(f"{as_sentence(sentence)}; add its file again with 'kvasir-node models add FILE'")
    found = [file_report(model) for model in usable]
    if as_json:
        print_json({"schema_version": 1, "models": found})
        return
    if not found:
        click.echo("no models yet; add one with: kvasir-node models add FILE")
        return
    print_table(
        ("NAME", "DIGEST", "ARCH", "LAYERS", "EXPERTS", "SIZE", "SOURCE"),
        [
            (
                model["name"],
                str(model["digest"])[:12],
                model["arch"],
                model["n_layer"],
                f"{model['n_expert']} ({model['n_expert_used']})",
                _mebibytes(model["file_bytes"]),
                model["source"] if model["source_exists"] else f"{model['source']} (gone)",
            )
            for model in found
        ],
    )
