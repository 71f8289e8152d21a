"""llama.cpp's own way of having experts computed elsewhere, its RPC backend: only there to compare with.

Loads the client library of an RPC server that the user built, into the ggml that this process has, and places
the routed experts in the server's memory as llama.cpp's `--override-tensor` does. That protocol has no
authentication and no deadline, and its client ends the process when anything goes wrong: an engine of a swarm
never loads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvasir_node.backbone.tensor_placement import place_tensors
from kvasir_node.native_library import load_ggml, load_rpc_client
from kvasir_proto.errors import EngineFailed


class RpcExperts:
    """An expert source on an RPC server. `attach` it to one model, which then holds its experts there."""

    def __init__(self, library_path: Path, host: str, port: int) -> None:
        """Load the client and connect. Raises `IncompatibleVersion` for a library of another ggml.

        llama.cpp's client ends the process when the server cannot be reached.
        """
        self._kept: list[Any] = []
        client = load_rpc_client(str(library_path))
        endpoint = f"{host}:{port}".encode()
        registry = client.add_server(endpoint)
        if not registry:
            raise EngineFailed("llama.cpp's RPC server offers no device")
        self._device = load_ggml().device_of_registry(registry, 0)
        self._buffer_type = client.buffer_type(endpoint, 0)

    def attach(self, model_params: Any, trunk_device: int | None) -> None:
        """Place the routed experts in the server's memory, everything else as without it."""
        self._kept += place_tensors(
            model_params,
            trunk_device=trunk_device,
            other_devices=(self._device,),
            expert_buffer_type=self._buffer_type,
        )

    def take_failure(self) -> None:
        """The client reports no failure: it ends the process."""
