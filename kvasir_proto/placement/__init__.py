"""Which node holds which experts.

Placement decides from what members say of themselves; it sees no bytes and asks nobody. Today every worker is
an equal; capacity, speed and rank rules come as further functions that give the same kind of plan.
"""
