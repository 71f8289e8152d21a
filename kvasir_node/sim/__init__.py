"""A whole swarm on one event queue: real cores, real bytes, made-up time, disks and network.

This is the main test of the swarm's core, and it ships as `kvasir-node sim`. No thread, no socket, no clock:
the same seed gives the same run, to the last event. What a core is, it knows from `kvasir_proto`; nothing of
this package is of any use to a daemon.
"""
