"""The I/O shell of Kvasir: sockets, files, clocks, processes and the model live here.

Every decision that can be made without touching the outside world is made in `kvasir_proto`;
this package carries the bytes in, carries the effects out, and is the only one that knows
trio, libp2p, llama.cpp or the operating system. It exports nothing but its version.
"""

__version__ = "0.1.0"
