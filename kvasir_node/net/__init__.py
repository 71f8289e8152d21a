"""The node's place in the network: the only package that knows libp2p.

libp2p carries identity and control here, never activations. Everything it gets wrong is worked around in
this package, each time with the reason beside it, so that the rest of Kvasir may believe what the ports
promise. It imports nothing eagerly: libp2p takes most of a second to load, and reading an identity needs
none of it.
"""
