"""`run` and what it says when it is up."""

from __future__ import annotations

import click

from kvasir_node.cli.entrance import entrance_of, join_option, remember_entrance
from kvasir_node.cli.output import note
from kvasir_node.cli.parameters import NonEmptyText
from kvasir_node.cli.session import CommandSession
from kvasir_node.stop_signals import held_back


@click.command()
@join_option
@click.option("--bootstrap", multiple=True, help="Address of a member to ask too; may be repeated.")
@click.option("--listen-host", help="IP address at which other nodes reach this one.")
@click.option("--listen-port", type=int, help="TCP port for other nodes; 0 takes a free one.")
@click.option("--data-port", type=int, help="TCP port for activations; 0 takes a free one.")
@click.option("--gateway-host", help="IP address for OpenAI clients; any but loopback needs a token.")
@click.option("--gateway-port", type=int, help="TCP port for OpenAI clients; 0 takes a free one.")
@click.option("--workers-min", type=int, help="Workers to wait for before the first plan, as backbone.")
@click.option("--holders", type=int, help="Workers that hold each expert, as backbone.")
@click.option("--ranks", help="Ranks that this node stands for, of backbone,output,bulk.")
@click.option("--memory-mib", type=int, help="MiB of memory offered for experts; half of all by default.")
@click.option("--lan", is_flag=True, default=None, help="Find members on this LAN by mDNS, and be found.")
@click.option("--threads", type=int, help="Threads that compute, in each engine.")
@click.option(
    "--kernel",
    help="What computes experts: ggml-cpu, ggml-device, opencl, emulated-f16 to see what it does, or another "
    "instruction set such as ggml-neon-v8.6.",
)
@click.option(
    "--kernel-device",
    help="Device for --kernel opencl: part of its name, or its number; for ggml-device: its name.",
)
@click.option("--device", help="A GPU for all but the routed experts: its name, or auto.")
@click.option(
    "--model",
    type=NonEmptyText(),
    help="The swarm's model where this home does not know it yet: a GGUF file or its address.",
)
@click.option(
    "--stop-on-eof",
    is_flag=True,
    help="Stop also when standard input ends, for a program that must not leave its nodes behind.",
)
@click.pass_obj
def run(
    session: CommandSession,
    join: str | None,
    bootstrap: tuple[str, ...],
    listen_host: str | None,
    listen_port: int | None,
    data_port: int | None,
    gateway_host: str | None,
    gateway_port: int | None,
    workers_min: int | None,
    holders: int | None,
    ranks: str | None,
    memory_mib: int | None,
    lan: bool | None,
    threads: int | None,
    kernel: str | None,
    kernel_device: str | None,
    device: str | None,
    model: str | None,
    stop_on_eof: bool,
) -> None:
    """Run the daemon in the foreground until SIGTERM, SIGHUP or Ctrl-C; a second SIGTERM or Ctrl-C: at once.

    The node takes part in the swarm that this home founded or entered before, or enters one with --join. The
    swarm elects its backbone; every node holds what the backbone's plan gives it.
    """
    entrance = entrance_of(join)
    if entrance.address:
        bootstrap = (entrance.address, *bootstrap)
    configuration = session.configure(
        is_daemon=True,
        swarm_bootstrap=list(bootstrap) or None,
        listen_host=listen_host,
        listen_port=listen_port,
        data_port=data_port,
        gateway_host=gateway_host,
        gateway_port=gateway_port,
        swarm_workers_min=workers_min,
        swarm_holders=holders,
        swarm_lan=lan,
        node_ranks=ranks,
        node_memory_mib=memory_mib,
        engine_threads=threads,
        engine_kernel=kernel,
        engine_kernel_device=kernel_device,
        engine_device=device,
        model=model,
    )
    # libp2p takes half a second to import: only now, when it is sure that the arguments are good.
    import trio

    from kvasir_node import app

    home = app.open_home(session.locations, configuration)
    remember_entrance(home.swarm_files, entrance)
    node = app.Node(home)

    def say_where(addresses: tuple[str, ...]) -> None:
        note("kvasir-node is running; others join through:")
        for address in addresses:
            note(f"  {address}")
        gateway = node.gateway_report()
        if gateway["is_answering"]:
            note(f"OpenAI clients use {gateway['address']}/v1")
        elif gateway["is_enabled"]:
            note(f"OpenAI clients are not answered yet: {gateway['reason']}")

    with held_back() as early:
        trio.run(node.run, say_where, stop_on_eof, early)
