# Thin calls only: the logic is in the kit (colibri-kit VERB) and in pytest.
#   make demo    a GGUF becomes a checked engine on a board, on this machine
#   make test    everything that CI runs
PYTHON ?= python3
VENV   ?= .venv
BOARD  ?= host
ARGS   ?=
BIN     = $(VENV)/bin

export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help setup venv engine demo test lint check bench format clean system

help:
	@sed -n 's/^#   //p' Makefile
	@echo "make engine BOARD=rpi4   make lint   make check   make bench   make format   make clean"

# The kit alone: enough for demo and engine.
venv: $(BIN)/.kit
$(BIN)/.kit: pyproject.toml setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or later is needed"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

# The kit and what tests and linters need.
setup: $(BIN)/.dev
$(BIN)/.dev: $(BIN)/.kit
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

engine: venv
	colibri-kit build --board $(BOARD) $(ARGS)

demo: venv
	colibri-kit demo $(ARGS)

# Installs the system packages that tests need (as root), else names the missing ones and fails.
system:
	$(PYTHON) tests/system_packages.py

test: setup system
	python -m pytest $(ARGS)

lint: setup
	ruff check kit tests setup.py
	ruff format --check kit tests setup.py
	mypy

check: lint test

bench: setup
	python -m pytest tests -q -m bench $(ARGS)

format: setup
	ruff check --fix kit tests setup.py
	ruff format kit tests setup.py
	find native -name '*.[ch]' -print0 | xargs -0 clang-format -i

clean:
	rm -rf build dist models .pytest_cache .mypy_cache .ruff_cache
	find . -name '*.egg-info' -prune -exec rm -rf {} +
