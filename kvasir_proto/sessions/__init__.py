"""Which sessions run on a backbone, and which of their tokens go through the layers together.

Several llama.cpp contexts decode side by side, several sequences in each. Here is decided who waits, who is
refused, whose tokens are in the next ubatch of which context, what of the KV cache is promised to whom, and
how a session ends. llama.cpp, logits, sampling, threads and clients are not known here.
"""
