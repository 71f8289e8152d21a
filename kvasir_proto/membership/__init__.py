"""Who is in the swarm and answers: SWIM, on a bounded partial view.

Each node watches a few others, hears about the rest by gossip, and compares whole tables now and then. What a
node costs does not grow with the swarm. Nothing here says what a member can do: that is its record, of which
membership only spreads which is the newest.
"""
