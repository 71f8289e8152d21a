"""The engine process: its start, its channel to control, its lease and its pinned TLS data plane."""
