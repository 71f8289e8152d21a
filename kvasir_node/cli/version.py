"""`version`: which versions work together here."""

from __future__ import annotations

import importlib.metadata
import platform

import click

from kvasir_node import __version__
from kvasir_node.cli.output import json_option, print_json
from kvasir_proto import PROTOCOL_VERSION


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Show the versions of Kvasir, its protocol and what it runs on."""
    document = {
        "schema_version": 1,
        "kvasir": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
        "libp2p": importlib.metadata.version("libp2p"),
    }
    if as_json:
        print_json(document)
        return
    for name, value in document.items():
        if name != "schema_version":
            click.echo(f"{name.replace('_', '-'):18}{value}")
