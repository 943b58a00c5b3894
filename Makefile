# Each target makes its own virtual environment first; nothing else has to be installed.
#   TORCH_SPEC  which torch to install, as for pip (default: torch>=2.11)
#   PYTHON      interpreter for the environment (default: the first of python3, python3.13 ... that is 3.11 or newer)
#   ARGS        passed on to pytest, to tests/gpu/run_all.py (for pytest behind --) or to the quickstart

TORCH_SPEC ?= torch>=2.11
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
            $(shell $(p) -c 'import sys; print("$(p)") if sys.version_info >= (3, 11) else None' 2>/dev/null)))
ARGS ?=

BIN := .venv/bin
KEY := $(shell { cat pyproject.toml; echo '$(TORCH_SPEC)'; } | cksum | tr -d ' ')
PACKAGE := .venv/.package-$(KEY)
TOOLS := .venv/.tools-$(KEY)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

.PHONY: help setup quickstart test test-slow test-gpu lint types docs-check format clean

help:  ## say what there is
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

quickstart: $(PACKAGE)  ## train, save, resume in another layout and generate: one to two minutes on two cores
	$(BIN)/python -m megatron_lightning.cli.quickstart $(ARGS)

test: lint types $(TOOLS)  ## lint, types, and every test that is not slow
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(TOOLS)  ## the tests of more than ten seconds
	$(PYTEST) -m slow $(ARGS)

test-gpu: $(TOOLS)  ## the tests that need CUDA devices, on all of them at once
	$(BIN)/python tests/gpu/run_all.py $(ARGS)

lint: $(TOOLS)  ## style, formatting, import rules, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell .

types: $(TOOLS)  ## static types
	$(BIN)/basedpyright --pythonpath $(BIN)/python --level error

docs-check: $(TOOLS)  ## links, commands and code blocks of the documents
	$(PYTEST) tests/unit/test_docs.py $(ARGS)

format: $(TOOLS)  ## rewrite the files as lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(TOOLS)  ## the virtual environment with all tools

clean:  ## remove caches and runs, not the environment
	rm -rf build dist runs .pytest_cache .ruff_cache .import_linter_cache

$(PACKAGE): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one with PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q "$(TORCH_SPEC)"
	$(BIN)/python -m pip install -q -e . "$(TORCH_SPEC)"
	@rm -f .venv/.package-* && touch $@

$(TOOLS): $(PACKAGE)
	$(BIN)/python -m pip install -q -e ".[dev,notebooks]" "$(TORCH_SPEC)"
	@rm -f .venv/.tools-* && touch $@
