# `make demo` and `make test` set up everything that they need in .venv and build/.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test bench bench-peers format check-format install clean setup build

JOBS ?= $(shell nproc)
RANKS ?= 2
PREFIX ?=
DEMO_ARGS ?=
PEERS_ARGS ?=

ifdef SANITIZE
BUILD := build-sanitize
CMAKE_FLAGS := -DSHARDSTEP_SANITIZE=ON -DSHARDSTEP_BUILD_EXAMPLES=OFF \
  -DSHARDSTEP_BUILD_BENCHMARKS=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1 -DNDEBUG"
TEST_FLAGS := --cpp-only
TEST_INSTALL :=
else
BUILD := build
TEST_INSTALL := install
endif

BIN := .venv/bin
READY := .venv/shardstep.stamp
CONFIGURED := $(BUILD)/build.ninja
NINJA = $(BIN)/ninja -C $(BUILD) -j $(JOBS)
CPP_FILES = $(shell git ls-files -co --exclude-standard '*.cpp' '*.h' '*.hpp')

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(READY)  ## Create .venv with the pinned tools

$(READY): requirements-dev.txt tools/setup.sh
	@tools/setup.sh
	@touch $@

# CMake reruns itself when its files change.
$(CONFIGURED): $(READY)
	@cmake -S . -B $(BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_PREFIX_PATH=$$($(BIN)/python -c 'import torch; print(torch.utils.cmake_prefix_path)') \
	  $(CMAKE_FLAGS) > $(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@touch $@

build: $(CONFIGURED)  ## Build everything into build/
	@$(NINJA)

demo: $(CONFIGURED)  ## Train a small transformer on RANKS=2 processes (DEMO_ARGS="--help")
	@$(NINJA) train_gpt
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --no-python --nproc-per-node $(RANKS) \
	  $(BUILD)/examples/train_gpt $(DEMO_ARGS)

test: build  ## Run every test; SANITIZE=1: the C++ ones under ASAN and UBSAN
	@$(if $(TEST_INSTALL),$(MAKE) --no-print-directory $(TEST_INSTALL) PREFIX=)
	@$(BIN)/python tools/run_tests.py --build $(BUILD) --jobs $(JOBS) $(TEST_FLAGS)

bench: $(CONFIGURED)  ## Print the tables of docs/performance.md
	@$(NINJA) local_update zero_step ddp_iteration
	@OMP_NUM_THREADS=1 $(BUILD)/benchmarks/local_update
	@OMP_NUM_THREADS=1 $(BUILD)/benchmarks/zero_step
	@$(BIN)/python benchmarks/ddp.py --build $(BUILD)
	@$(MAKE) --no-print-directory install PREFIX=
	@$(BIN)/python benchmarks/python_zero.py
	@$(BIN)/python benchmarks/checkpoint.py

bench-peers: install  ## Time ours beside DDP, torch's ZeRO, FSDP2, DeepSpeed (PEERS_ARGS="--help")
	@$(BIN)/python benchmarks/peers $(PEERS_ARGS)

format: $(READY)  ## Format the C++ and Python sources
	@$(BIN)/clang-format -i $(CPP_FILES)
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

check-format: $(READY)  ## Fail if a source is not formatted or a type is wrong
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary

# The wheel is packed from what is in build/: scikit-build-core finds it configured and built.
# Without its note it never drops the CMake cache, which it would after a change of Python.
install: $(CONFIGURED)  ## Install the Python package into .venv; PREFIX=dir: the C++ one into dir
ifeq ($(PREFIX),)
	@$(NINJA) shardstep_python
	@rm -f $(BUILD)/.skbuild-info.json
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --no-deps --force-reinstall -C build-dir=$(BUILD) \
	  -C cmake.define.CMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) .
else
	@$(NINJA) shardstep
	@cmake --install $(BUILD) --prefix $(PREFIX)
endif

clean:  ## Remove what was built; .venv stays
	@rm -rf build build-sanitize build.log build-sanitize.log
