"""The command line: arguments in, exit status out.

Results go to standard output, everything else to standard error. Whatever goes wrong ends here as one
sentence and the documented exit status of its class (`kvasir_proto.errors`); a traceback is a bug. Commands
live in one module each and are imported when they are called for, so that `version` costs no libp2p.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any, Final

import click

from kvasir_node.cli.parameters import NonEmptyPath
from kvasir_node.cli.session import CommandSession
from kvasir_node.cli.standard_streams import OutputUnwritable, abandon_output, open_standard_streams
from kvasir_node.command_word import is_daemon
from kvasir_node.system_words import in_words
from kvasir_proto.errors import KvasirError, ProtocolError, UsageError
from kvasir_proto.limits import as_sentence

_COMMANDS: Final = {
    "demo": ("demo", "Run a real swarm on this machine and compare its text with a single process."),
    "init": ("init", "Make this home's identity; found a swarm with --found, enter one with --join."),
    "run": ("run", "Run the daemon in the foreground."),
    "status": ("status", "Show what the daemon and its swarm are doing."),
    "peers": ("members", "List the members and the way to each."),
    "ping": ("ping", "Measure the round trip to a member, or to all."),
    "invite": ("invite", "Let one more node into the swarm."),
    "revoke": ("revoke", "Put a node out of the swarm, for good; at the founder's node."),
    "recover": ("recover", "Begin a new epoch when the quorum of electors is lost for good."),
    "generate": ("generate", "Generate text on the running swarm."),
    "models": ("models", "The models of this home."),
    "measure": ("measure", "Measure how far a swarm is from a single process."),
    "certify": ("certify", "Measure what this machine's kernel computes, and what it is fit for."),
    "bench": ("bench", "Measure speed beside a single process."),
    "sim": ("sim", "Run a whole swarm in one process, with every fault, and check what must hold."),
    "doctor": ("doctor", "Check this machine and say what to do."),
    "stop": ("stop", "Stop the running daemon in good order."),
    "version": ("version", "Show versions."),
}
EXIT_STATUS_HELP: Final = (
    "Exit status: 0 ok, 1 failed, 2 usage, 3 not running, 4 already running, 5 port in use, "
    "6 configuration invalid, 7 model missing, damaged or no space, 8 incompatible version, "
    "9 out of tolerance."
)


class _LazyGroup(click.Group):
    """Knows its commands by name and imports one only when it is called or asked for help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module_name, _ = _COMMANDS[cmd_name]
        module = importlib.import_module(f"kvasir_node.cli.{module_name}")
        command: click.Command = getattr(module, module_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(
    cls=_LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_STATUS_HELP,
)
@click.option(
    "--home", type=NonEmptyPath(path_type=Path), help="Keep everything of this node in this directory."
)
@click.option("--log-level", help="debug, info, warning or error.")
@click.option("--log-format", help="console or json.")
@click.pass_context
def cli(ctx: click.Context, home: Path | None, log_level: str | None, log_format: str | None) -> None:
    """One Mixture-of-Experts model, run by many machines together."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        return
    flags: dict[str, object] = {"log.level": log_level, "log.format": log_format}
    ctx.obj = CommandSession(home, flags)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit status."""
    open_standard_streams()
    try:
        result: Any = cli.main(args=arguments, prog_name="kvasir-node", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.UsageError as error:
        error.show(file=sys.stderr)
        return UsageError.exit_code
    except click.ClickException as error:
        return _fail(error.format_message(), 1)
    except (click.Abort, KeyboardInterrupt):
        return 0 if is_daemon(sys.argv[1:] if arguments is None else arguments) else _fail("interrupted", 1)
    except OutputUnwritable as error:
        abandon_output()
        return _fail(str(error), error.exit_code)
    except KvasirError as error:
        return _fail(str(error), error.exit_code)
    except ProtocolError as error:
        return _fail(str(error), 1)
    except OSError as error:
        return _fail(in_words(error), 1)


def _fail(sentence: str, status: int) -> int:
    with contextlib.suppress(OSError):
        click.echo(f"kvasir-node: {as_sentence(sentence)}", err=True)
    return status
