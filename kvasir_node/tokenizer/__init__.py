"""The model's vocabulary for whoever has no engine: llama.cpp's own tokeniser, in a child process."""
