"""The backbone: llama.cpp with the expert hook, the dispatcher and the sessions of its engine process."""
