# make demo | test | test-all | lint | mutants | bench | gpu | private: each sets up .venv first,
# and once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Pinned: a bare `torch` may bring gigabytes of another build. triton is the version that
# torch 2.13.0 with CUDA asks for; on a CPU machine it interprets and compiles the GPU kernels.
TORCH := torch==2.13.0
TOOLS := triton==3.7.1 torchvision==0.28.0 "setuptools>=77" ninja==1.13.2 \
         nbclient==0.11.0 ipykernel==7.4.0 mkdocs-material==9.8.1 build==1.6.1 \
         pytest==9.2.0 pytest-benchmark==5.3.1 pytest-xdist==3.8.0 hypothesis==6.170.15 tensorboard==2.21.0 mypy==2.4.1 ruff==0.17.4 matplotlib==3.10.9

# What some examples use, and the table of docs/networks.md; none of them brings another torch.
EXTRAS := lightning==2.6.6 transformers==5.23.0 timm==1.0.31
PIP := $(BIN)/python -m pip install --disable-pip-version-check

# Engines of private inference have environments of their own; only `make private` needs them.
ENGINE_PYTHON ?= python3.11
SPU := spu==0.9.5 jax==0.4.34 jaxlib==0.4.34 numpy==1.26.4 safetensors==0.8.0
CRYPTEN := $(TORCH) numpy safetensors==0.8.0 omegaconf onnx pyyaml future pandas scipy

.PHONY: setup extras test test-all lint mutants demo docs bench gpu private clean
setup: $(READY)

$(READY): Makefile pyproject.toml setup.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "fastbcd needs Python 3.10 or newer: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "1 of 3: torch, once, about 200 MB"
	$(PIP) $(TORCH)
	@echo "2 of 3: tools"
	$(PIP) $(TOOLS)
	@echo "3 of 3: fastbcd, whose kernels are compiled"
	$(PIP) --no-build-isolation -e ".[onnx]"
	@touch $(READY)

extras: $(READY)
	$(PIP) $(EXTRAS)

# One process per core; a file's tests share its fixtures, so they stay in one process.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) -m "not long"

# What `make test` runs, what is marked long, and each fuzzer of tests/hostile for a while.
test-all: export FASTBCD_HOSTILE_SECONDS ?= 60
test-all: extras
	$(PYTEST)

# `make test` has these too: tests/test_quality.py reads them here.
lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# Changes the code in 70 places, one at a time, and runs the tests that should notice: hours.
mutants: $(READY)
	$(BIN)/python tests/mutants.py

demo: $(READY)
	$(BIN)/fastbcd demo

# The docs site, in build/site.
docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

bench: $(READY)
	$(BIN)/python benchmarks/table.py

# On a machine with a GPU: check, GPU tests and benchmarks, and a page of them to send.
gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py

# Two-party engines, and a check of them with small nets, on this machine alone.
private: $(READY) .venv-spu/.ready .venv-crypten/.ready
	$(BIN)/python -m pytest tests/private/test_running.py tests/private/test_serving.py

.venv-spu/.ready: Makefile
	@$(ENGINE_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 10), (3, 11)))' || \
	  { echo "SPU needs Python 3.10 or 3.11: make private ENGINE_PYTHON=python3.10"; exit 1; }
	$(ENGINE_PYTHON) -m venv .venv-spu
	.venv-spu/bin/python -m pip install --quiet --disable-pip-version-check $(SPU)
	@touch $@

.venv-crypten/.ready: Makefile
	$(ENGINE_PYTHON) -m venv .venv-crypten
	.venv-crypten/bin/python -m pip install --quiet --disable-pip-version-check $(CRYPTEN)
	.venv-crypten/bin/python -m pip install --quiet --disable-pip-version-check --no-deps crypten==0.4.1
	@touch $@

clean:
	rm -rf .venv .venv-spu .venv-crypten build *.egg-info kernels/cpu/*.so kernels/cpu/build.json
