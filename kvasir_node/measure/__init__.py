"""Measurements of numerical equivalence: one module a level, each comparing a swarm with a reference."""
