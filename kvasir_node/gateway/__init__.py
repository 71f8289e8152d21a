"""The gateway: OpenAI's API on any node, for the model that its swarm runs.

A client's request becomes a session of tokens (`ports.Completions`), and the session an answer. Nothing here
samples or computes, and nothing believes a client: requests, templates and whoever connects are bounded.
"""
