# One target a task. `make demo` and `make test` do all their own set-up, in .venv and nowhere else.
# Needs: Python 3.11 to 3.13 with venv and headers, a C++ compiler, make. `make PYTHON=/path/to/python3.12 test` picks one.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
ENVIRONMENT := $(VENV)/.environment-stamp
NATIVE := $(VENV)/.native-stamp
FUZZ := $(VENV)/.fuzz-stamp
SECONDS ?= 60
SIM_NODES ?= 12
SIM_JOBS ?= 2
NATIVE_SOURCES := $(wildcard native/src/* native/include/*)
BUILDS ?=
STAND_INS := $(shell find deploy/stand-ins -name '*.py' -not -path '*/build/*') $(wildcard deploy/stand-ins/*/pyproject.toml)

.PHONY: help setup backends browser demo test sim fuzz lint type bench shapes failure-matrix clean

help:
	@echo 'make setup   prepare .venv: dependencies, native library, the kvasir-node command'
	@echo 'make backends  install what further backends need, where that can be had, and say what cannot'
	@echo 'make browser   install a Chromium, which the tests of the dashboard look at it with'
	@echo 'make demo    run a swarm on this machine with the model that ships with it'
	@echo 'make test    run the tests'
	@echo 'make sim     run 200 whole swarms on made-up time, with every fault'
	@echo 'make fuzz    feed noise to what reads strangers'"'"' bytes, for SECONDS=60'
	@echo 'make lint    check style and formatting'
	@echo 'make type    check types'
	@echo 'make bench   measure the swarm against a single process'
	@echo 'make shapes  run every architecture of experts through the hook and compare'
	@echo 'make failure-matrix  every fault of the data plane at every moment, as a table'
	@echo 'make clean   remove .venv and everything that was built'

setup: $(NATIVE)

# Optional for everything else: what is missing is said, and its tests skip with a reason.
# BUILDS=all also builds the kernel hosts that take more time than they show, BUILDS=none builds none.
backends: $(NATIVE)
	@PYTHON=$(BIN)/python BUILDS='$(BUILDS)' deploy/backends

# Optional in the same way.
browser: $(NATIVE)
	@PYTHON=$(BIN)/python deploy/browser

demo: $(NATIVE)
	@$(BIN)/kvasir-node demo $(ARGS)

# All tests, file by file in two processes, in the order of their folders: tests/loopback with the slowest files comes
# early, so that nobody waits for one of them at the end. ARGS=... is one plain run of pytest, in one process.
test: $(NATIVE)
	@$(BIN)/python -m pytest $(if $(strip $(ARGS)),$(ARGS),--numprocesses 2 --dist loadfile --no-loadscope-reorder)

sim: $(NATIVE)
	@$(BIN)/kvasir-node sim --nodes $(SIM_NODES) --seconds 120 --seeds 1..200 --faults all --jobs $(SIM_JOBS) $(ARGS)

# Findings and the inputs that were worth keeping lie in .fuzz; a later run goes on from there.
fuzz: $(FUZZ)
	@$(BIN)/python -W ignore::ResourceWarning -m tests.fuzz --seconds $(SECONDS) $(ARGS)

lint: $(NATIVE)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

type: $(NATIVE)
	@$(BIN)/mypy -p kvasir_proto -p kvasir_node -p tests

bench: $(NATIVE)
	@$(BIN)/kvasir-node bench $(ARGS)

shapes: $(NATIVE)
	@$(BIN)/python -m tests.shapes $(ARGS)

failure-matrix: $(NATIVE)
	@$(BIN)/python -m tests.loopback.failure_matrix

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .fuzz *.egg-info
	rm -rf deploy/stand-ins/*/build deploy/stand-ins/*/*.egg-info
	find kvasir_proto kvasir_node tests deploy -name __pycache__ -type d -prune -exec rm -rf {} +
	find kvasir_node -maxdepth 1 -name '_native*.so' -delete

$(BIN)/python:
	@python=$$(PYTHON='$(PYTHON)' deploy/find-python) || exit 1; \
	"$$python" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The stand-ins go first, so that pip finds libp2p's exact pins already met (README, "Why stand-ins?").
# llama.cpp is compiled with two jobs, and only the libraries of it; pip keeps the wheel, so that the next environment of
# this version of Python takes seconds.
# Options for CMake make another wheel than the one that pip keeps (docs/how-to/gpu.md), so the cache is then left alone.
# The stamp carries the time the installation began: what changes meanwhile is seen the next time.
$(ENVIRONMENT): pyproject.toml deploy/constraints.txt $(STAND_INS) | $(BIN)/python
	@command -v $${CXX:-c++} >/dev/null || { echo 'Kvasir needs a C++ compiler and found none: install g++ or clang.' >&2; exit 1; }
	@echo 'Setting up .venv; the first time llama.cpp is compiled, which takes some minutes.' >&2
	@touch $@.started
	$(PIP) install --upgrade -c deploy/constraints.txt pip
	$(PIP) install --no-deps --force-reinstall deploy/stand-ins/fastecdsa deploy/stand-ins/trio-typing
	CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama.cpp_INCLUDE='$(CURDIR)/deploy/llama-cpp/library-only.cmake' $${CMAKE_ARGS:-}" \
	CMAKE_BUILD_PARALLEL_LEVEL=$${CMAKE_BUILD_PARALLEL_LEVEL:-2} \
		$(PIP) install $${CMAKE_ARGS:+--no-cache-dir} -c deploy/constraints.txt --group dev --editable .
	@mv $@.started $@

# Atheris has wheels for Linux on x86-64 only, and only fuzzing needs it.
$(FUZZ): $(NATIVE)
	$(PIP) install -c deploy/constraints.txt --group fuzz
	@touch $@

# Rebuilds the native library alone, when it is what changed since the environment was made.
$(NATIVE): $(NATIVE_SOURCES) kvasir_node/__init__.py | $(ENVIRONMENT)
	@if [ -n "$$(find $^ -newer $(ENVIRONMENT) -print -quit)" ]; then \
		echo 'Building the native library' >&2; \
		$(PIP) install --no-deps --no-build-isolation --editable .; \
	fi
	@touch $@
