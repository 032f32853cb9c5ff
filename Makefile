# Everything is built in .venv with pip; a target installs only what changed since the last time.
PYTHON ?= python3
# The release of torch to install first, with any options of pip's that choose its build (a CPU build is far smaller).
TORCH ?= torch==2.13.0
# Test processes, one compute thread each.
WORKERS ?= 2
PROMPT ?= Explain in two sentences what a spark plug does.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PACKAGE_SOURCES := pyproject.toml CMakeLists.txt $(wildcard native/* native/kernels/*)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint format clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: export DEMO_PROMPT := $(value PROMPT)
demo: $(VENV)/.installed  ## install, then answer PROMPT with the default model
	@$(BIN)/sparkgap generate "$$DEMO_PROMPT"
	@echo "The command is $(BIN)/sparkgap; more: $(BIN)/sparkgap --help"

test: $(VENV)/.installed-dev  ## run the fast tests
	$(PYTEST)

test-slow: $(VENV)/.installed-dev  ## run the long tests too
	$(PYTEST) -m "slow or not slow"

lint: $(VENV)/.installed-dev  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## rewrite files in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Sparkgap needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@for compiler in $${CXX-} c++ g++ clang++; do command -v $$compiler && break; done >/dev/null || { \
	  echo "Sparkgap needs a C++20 compiler: install g++ 11 or clang 14, or newer" \
	    "(Debian and Ubuntu: apt install g++)." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(PACKAGE_SOURCES)
	$(PIP) --editable '.[server]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch $(PACKAGE_SOURCES)
	$(PIP) --editable '.[server,dev]'
	@touch $@ $(VENV)/.installed
