# `make demo` and `make test` do all their own set-up; they need only Python 3.11 or newer.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PLAIN := $(VENV)/.plain
STAMP := $(VENV)/.installed
COMPAT := .venv-compat
PEERS := .venv-peers
export HF_HUB_OFFLINE ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: venv demo test check docs bench bench-peers test-compat

venv: $(STAMP)

$(PLAIN): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	# torch first, pinned; on Linux without a GPU save gigabytes with
	#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

# what tests, checks and docs need besides
$(STAMP): $(PLAIN)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

demo: $(PLAIN)
	$(BIN)/headscope models get smollm2-135m
	$(BIN)/headscope scan smollm2-135m --out atlas
	@echo "Open atlas/report.html in a browser."

test: $(STAMP)
	$(BIN)/headscope models get smollm2-135m
	$(BIN)/python -m pytest -q -n 2

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/headscope models get smollm2-135m
	$(BIN)/python docs/build.py

bench: $(STAMP)
	$(BIN)/headscope models get smollm2-135m
	-$(MAKE) bench-peers
	$(BIN)/python -m benchmarks

# the tools that the sweep is compared with, in an environment of their own; where they are missing, the page says so
bench-peers: $(PEERS)/.installed

$(PEERS)/.installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/pip install --quiet "$$(grep '^torch==' $<)"
	$(PEERS)/bin/pip install --quiet -r $<
	touch $@

# the oldest transformers we promise, in an environment of its own
$(COMPAT)/.installed: pyproject.toml
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet --upgrade pip
	$(COMPAT)/bin/pip install --quiet -c constraints.txt torch
	$(COMPAT)/bin/pip install --quiet "transformers==4.57.*" -e ".[dev]"
	touch $@

test-compat: $(COMPAT)/.installed
	$(COMPAT)/bin/python -m pytest -q tests/families
