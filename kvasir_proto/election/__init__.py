"""Who is the backbone, and for how long: elections, leases, electorates.

The core is `election.core`; why it is safe is argued in `docs/explanation/election.md`. Knows keys, terms and
clocks; not what a backbone does, nor how a member is known to be alive.
"""
