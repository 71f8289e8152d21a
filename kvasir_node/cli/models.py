"""`models`: what this home has, and taking in a file."""

from __future__ import annotations

from pathlib import Path

import click

from kvasir_node.backbone.trial import try_backbone_file
from kvasir_node.cli.output import json_option, note, print_json, print_table, progress_on_stderr
from kvasir_node.cli.parameters import NonEmptyPath
from kvasir_node.cli.session import CommandSession
from kvasir_node.model.report import file_report
from kvasir_node.model.store import ModelStore
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
    if as_json:
        print_json({"schema_version": 1, "model": file_report(model)})
        return
    described = file_report(model)
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
