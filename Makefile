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

# docs/conformance.md: the same files through packtrain and llama.cpp, whose library, server and Python package are built
# in a folder of their own; without -march=native: some compilers make its AMX code wrong. LLAMA_PYTHON=…, a Python with
# llama-cpp-python, and LLAMA_SERVER=… take what is there already.
VOCABULARIES ?= ../shared/data/tokenizers/ggml-vocab
LLAMA := build/llama
ifndef LLAMA_PYTHON
LLAMA_PYTHON := $(LLAMA)/bin/python
LLAMA_SERVER := $(LLAMA)/cpp/bin/llama-server
LLAMA_READY := $(LLAMA)/.ready
endif
conformance: $(VENV)/.ready $(LLAMA_READY)
	$(RUN) -m benchmarks.conformance --llama-python $(LLAMA_PYTHON) --write docs/conformance.md \
	    $(if $(LLAMA_SERVER),--llama-server $(LLAMA_SERVER)) \
	    $(if $(wildcard $(VOCABULARIES)),--vocabularies $(VOCABULARIES))

$(LLAMA)/.ready:
	$(PYTHON) -m venv $(LLAMA)
	$(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check cmake
	$(LLAMA)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(LLAMA) \
	    --no-binary llama-cpp-python llama-cpp-python==0.3.36
	tar -xzf $(LLAMA)/llama_cpp_python-0.3.36.tar.gz -C $(LLAMA)
	$(LLAMA)/bin/cmake -S $(LLAMA)/llama_cpp_python-0.3.36/vendor/llama.cpp -B $(LLAMA)/cpp -DCMAKE_BUILD_TYPE=Release \
	    -DGGML_NATIVE=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF
	$(LLAMA)/bin/cmake --build $(LLAMA)/cpp --target llama-server llama-quantize llama-bench --parallel 2
	CMAKE_ARGS=-DLLAMA_BUILD=OFF $(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check \
	    $(LLAMA)/llama_cpp_python-0.3.36.tar.gz
	touch $@

# Records tests/goldens anew from PyTorch.
goldens: $(VENV)/.ready
	$(RUN) -m tests.golden

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
