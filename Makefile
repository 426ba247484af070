# `make test` sets up all it needs in .venv; nothing outside this folder is touched but the kernel cache.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint bench goldens clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

# The whole path on this Python's own documentation: vocabulary, plan, training, demo/model.gguf, a sample.
demo: $(VENV)/.ready
	$(RUN) -m packtrain demo

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
	$(RUN) -m benchmarks.memory

# Records tests/goldens anew from PyTorch.
goldens: $(VENV)/.ready
	$(RUN) -m tests.golden

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
