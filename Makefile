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
.PHONY: help demo test test-slow test-sanitize lint format clean

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

# The native module apart from the installed one, in a build that checks itself.
# Leaks are Python's and torch's to report. Sanitizers write to standard error, which pytest must not capture then.
SANITIZERS ?= address,undefined
SANITIZED_TESTS ?= tests/native tests/device tests/graphs
comma := ,
SANITIZED := build/sanitize-$(subst $(comma),-,$(SANITIZERS))
test-sanitize: check-sanitizers $(VENV)/.installed-dev $(VENV)/.cmake  ## run the native tests on a build with sanitizers (needs g++)
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_CXX_COMPILER=g++ -DCMAKE_BUILD_TYPE=Debug \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)" -DSPARKGAP_SANITIZE=$(SANITIZERS)
	$(BIN)/cmake --build $(SANITIZED)
	module="$$(ls $(abspath $(SANITIZED))/_native*.so)" && \
	runtime="$$(ldd "$$module" | awk '$$1 ~ /^lib(asan|tsan|ubsan|stdc\+\+)\./ { print $$3 }')" && \
	LD_PRELOAD="$$(echo $$runtime)" SPARKGAP_NATIVE_MODULE="$$module" PYTHONPATH=tests/other_build \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
	  $(PYTEST) --capture=sys $(SANITIZED_TESTS)

.PHONY: check-sanitizers
check-sanitizers:
	@mkdir -p $(SANITIZED)
	@echo 'int main() {}' | g++ -fsanitize=$(SANITIZERS) -x c++ - -o $(SANITIZED)/probe && $(SANITIZED)/probe || { \
	  echo "g++ cannot build with -fsanitize=$(SANITIZERS): install g++ with its sanitizers (Debian and Ubuntu: apt" \
	    "install g++; Fedora: dnf install gcc-c++ libasan libubsan libtsan)." >&2; exit 1; }

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

$(VENV)/.cmake: $(VENV)/.torch
	$(PIP) 'cmake>=3.20' ninja 'nanobind>=2.4'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(PACKAGE_SOURCES)
	$(PIP) --editable '.[server]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch $(PACKAGE_SOURCES)
	$(PIP) --editable '.[server,dev]'
	@touch $@ $(VENV)/.installed
