# Read by CMake inside llama.cpp's own project, when `make setup` compiles llama-cpp-python (see the Makefile).
# Kvasir uses libllama and ggml; the command-line tools' common library and its HTTP client would double the time.
# llama-cpp-python forces the option on in the cache, where a normal variable, as here, still wins over it.
set(LLAMA_BUILD_COMMON OFF)
