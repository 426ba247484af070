# `make test` sets up all it needs in .venv; nothing outside this folder is touched but the kernel cache.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint bench goldens clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

# Trains a small llama on its own source and lets it write: about half a minute once kernels are compiled.
demo: $(VENV)/.ready
	$(RUN) examples/train_llama.py

test: $(VENV)/.ready lint
	$(RUN) -m pytest

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Figures that the README and the changelog quote. The peer, PyTorch, is not installed by this file.
bench: $(VENV)/.ready
	$(RUN) -m benchmarks.packing
	$(RUN) -m benchmarks.engine
	$(RUN) -m benchmarks.train

# Records tests/goldens anew from PyTorch.
goldens: $(VENV)/.ready
	$(RUN) -m tests.golden

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
