# `make test` sets up all it needs in .venv; nothing outside this folder is touched but the kernel cache.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint bench conformance goldens clean

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

# docs/conformance.md: the same files through packtrain and llama.cpp. llama.cpp is built in a folder of its own, without
# -march=native: some compilers make its AMX code wrong. LLAMA_PYTHON=… takes one that is there already.
LLAMA_PYTHON ?= build/llama/bin/python
VOCABULARIES ?= ../shared/data/tokenizers/ggml-vocab
conformance: $(VENV)/.ready $(LLAMA_PYTHON)
	$(RUN) -m benchmarks.conformance --llama-python $(LLAMA_PYTHON) --write docs/conformance.md \
	    $(if $(wildcard $(VOCABULARIES)),--vocabularies $(VOCABULARIES))

build/llama/bin/python:
	$(PYTHON) -m venv build/llama.part
	CMAKE_ARGS=-DGGML_NATIVE=OFF build/llama.part/bin/python -m pip install --quiet --disable-pip-version-check \
	    --no-binary llama-cpp-python llama-cpp-python==0.3.36
	mv build/llama.part build/llama

# Records tests/goldens anew from PyTorch.
goldens: $(VENV)/.ready
	$(RUN) -m tests.golden

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
