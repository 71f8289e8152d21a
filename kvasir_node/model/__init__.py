"""Model files: reading GGUF without trust, manifests, and the files Kvasir itself writes for llama.cpp."""
