"""`models`: what this home has, and taking in a file."""

from __future__ import annotations

from pathlib import Path

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
from kvasir_node.model.gguf_writer import new_file
from kvasir_node.model.manifest_file import read_manifest_of_others
from kvasir_node.model.model_url import ModelUrl
from kvasir_node.model.report import file_report, manifest_report
from kvasir_node.model.store import ModelStore, StoredModel
from kvasir_proto.limits import as_sentence


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
    are kept where all of them have room. Of a model in several files give the first.
    """
    session.configure()
    session.locations.prepare()
    manifest = None if manifest_file is None else read_manifest_of_others(manifest_file)
    with progress_on_stderr("fetching", shows_rate=True) as progress:
        model = ModelStore(session.locations.models).pull(
            ModelUrl(url), progress, try_backbone_file, manifest=manifest, keep_experts=not no_experts
        )
    if not no_experts and manifest is None and not file_report(model)["fetched_expert_bytes"]:
        note("the experts were not kept: all of them together have no room on the disk")
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
