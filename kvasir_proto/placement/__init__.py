"""Which node holds which experts.

Placement decides from what members say of themselves; it sees no bytes and asks nobody. `inventory` is what
it knows, `rebalance.place` what is best, `transition.next_step` how to get there, `core` when.
docs/explanation/placement.md gives the argument.
"""
