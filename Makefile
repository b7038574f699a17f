# `make demo` and `make test` set up what they need in .venv and build/, and no more than that.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test bench bench-build bench-peers test-clients wheel torch-matrix prove fuzz soak docs site test-docs format check-format check-types install clean setup build

JOBS ?= $(shell nproc)
RANKS ?= 2
PREFIX ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
PEERS_ARGS ?=
MATRIX_ARGS ?=
CLIENTS_ARGS ?=
PROVE_ARGS ?=
SECONDS ?= 60
FUZZ_ARGS ?=
MINUTES ?= 10
SOAK_ARGS ?=

ifdef SANITIZE
SANITIZER := $(if $(filter thread,$(SANITIZE)),thread,address)
BUILD := build-sanitize-$(SANITIZER)
CMAKE_FLAGS := -DSHARDSTEP_SANITIZE=$(SANITIZER) -DSHARDSTEP_BUILD_EXAMPLES=OFF \
  -DSHARDSTEP_BUILD_BENCHMARKS=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1 -DNDEBUG"
TEST_FLAGS := --cpp-only --sanitizer $(SANITIZER)
TEST_INSTALL :=
else
BUILD := build
TEST_INSTALL := install
endif
ifdef FULL
export SHARDSTEP_FULL := 1
endif
ifdef DEVICE
TEST_FLAGS := --device $(DEVICE)
endif

BIN := .venv/bin
# cmake and ninja may come from PyPI.
export PATH := $(abspath $(BIN)):$(PATH)
# .venv is ours, and torch takes twice as long to import without its byte code.
unexport PYTHONDONTWRITEBYTECODE
NINJA = ninja -C $(BUILD) -j $(JOBS)
CPP_FILES = $(shell git ls-files -co --exclude-standard '*.cpp' '*.h' '*.hpp')

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(foreach part,build python test format types,.venv/$(part).stamp)  ## Install what any target needs

.venv/%.stamp: requirements/%.txt tools/setup.sh
	@tools/setup.sh $*
	@touch $@
.venv/python.stamp .venv/test.stamp .venv/format.stamp .venv/types.stamp .venv/docs.stamp: .venv/build.stamp

# $(1): flags for CMake. It reruns itself when its files change.
define configure
@echo "configuring $(BUILD)"
@cmake -S . -B $(BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
  -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
  -DCMAKE_PREFIX_PATH=$(abspath .venv/system/usr) $(CMAKE_FLAGS) $(1) \
  > $(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
@touch $@ $(BUILD)/build.ninja
endef

# The tests need GoogleTest, the rest does not.
$(BUILD)/build.ninja: .venv/build.stamp
	$(call configure,$(if $(wildcard $(BUILD)/CMakeCache.txt),,-DSHARDSTEP_BUILD_TESTS=OFF))

$(BUILD)/tests.stamp: .venv/build.stamp .venv/python.stamp .venv/test.stamp
	$(call configure,-DSHARDSTEP_BUILD_TESTS=ON)

build: $(BUILD)/tests.stamp  ## Build everything but the benchmarks into build/
	@$(NINJA)

DEMO := $(BUILD)/demo
TRAIN_GPT := $(BUILD)/examples/train_gpt
demo: $(BUILD)/build.ninja  ## Train a small transformer on RANKS=2 processes (DEMO_ARGS="--help")
	@$(NINJA) train_gpt
ifneq ($(filter -h --help,$(DEMO_ARGS)),)
	@$(TRAIN_GPT) --help
else
	@mkdir -p $(DEMO)
	@OMP_NUM_THREADS=1 PYTHONWARNINGS="ignore:Failed to initialize NumPy" \
	  torchrun --standalone --no-python --nproc-per-node $(RANKS) -- \
	  $(TRAIN_GPT) --log $(DEMO)/loss.csv --memory $(DEMO)/memory.csv $(DEMO_ARGS)
	@$(BIN)/python examples/plot_run.py $(DEMO)/loss.csv $(DEMO)/memory.csv $(DEMO)/run.png
	@printf '\nNext, stop a run with Ctrl-C and resume it on 4 ranks:\n%s\n%s\n' \
	  '  make demo DEMO_ARGS="--checkpoint $(DEMO)/checkpoint"' \
	  '  make demo DEMO_ARGS="--checkpoint $(DEMO)/checkpoint" RANKS=4'
	@printf 'Or train the same model from Python:\n%s\n' \
	  '  make install && .venv/bin/torchrun --standalone --nproc-per-node 2 -- examples/train_gpt.py'
endif

test: build $(if $(FULL),.venv/types.stamp .venv/docs.stamp)  ## Run the tests; FULL=1: the long ones too; SANITIZE=1: C++ under ASAN and UBSAN; SANITIZE=thread: under TSAN; DEVICE=sim: those on ranks, on a simulated device
	@$(if $(FULL),$(if $(SANITIZE),,$(NINJA) $(BENCHMARKS) $(FULL_ONLY)))
	@$(if $(TEST_INSTALL),$(MAKE) --no-print-directory $(TEST_INSTALL) PREFIX=)
	@$(BIN)/python tools/run_tests.py --build $(BUILD) --jobs $(JOBS) $(TEST_FLAGS)

BENCHMARKS := local_update zero_step ddp_iteration
FULL_ONLY := classify_images
bench: install .venv/test.stamp  ## Print the tables of docs/performance.md
	@$(NINJA) $(BENCHMARKS)
	@OMP_NUM_THREADS=1 $(BUILD)/benchmarks/local_update
	@OMP_NUM_THREADS=1 $(BUILD)/benchmarks/zero_step
	@$(BIN)/python benchmarks/ddp.py --build $(BUILD)
	@$(BIN)/python benchmarks/python_zero.py
	@$(BIN)/python benchmarks/checkpoint.py
	@$(BIN)/python benchmarks/masters.py
	@$(BIN)/python benchmarks/muon.py

bench-build:  ## Time demo, test and rebuilding from a clean clone (BENCH_ARGS="--help")
	@python3 benchmarks/build_time.py $(BENCH_ARGS)

bench-peers: install .venv/test.stamp  ## Time ours beside DDP, torch's ZeRO, FSDP2, DeepSpeed (PEERS_ARGS="--help")
	@$(BIN)/python benchmarks/peers $(PEERS_ARGS)

test-clients: install .venv/test.stamp  ## Train with trainers from PyPI, and write docs/clients.md (CLIENTS_ARGS="-k lightning")
	@tools/setup_clients.sh; status=$$?; if [[ $$status -eq 3 ]]; then \
	  echo "skipped: PyPI cannot be reached, and the trainers come from there"; \
	elif [[ $$status -eq 0 ]]; then \
	  OMP_NUM_THREADS=1 SHARDSTEP_CLIENTS_TABLE=docs/clients.md \
	  .venv-clients/bin/python -m pytest -q -p no:cacheprovider tests/clients $(CLIENTS_ARGS); \
	else exit $$status; fi

# It uses no file of build/, whose library has points at which tests end a process.
wheel: .venv/python.stamp .venv/build.stamp  ## Build a wheel into dist/, and test it in an environment of its own
	@$(BIN)/python tools/make_wheel.py

torch-matrix:  ## Build and test with each supported torch, 6 GB each (MATRIX_ARGS="--help")
	@python3 tools/torch_matrix.py $(MATRIX_ARGS)

prove:  ## Check the models in proofs/ with spin (PROVE_ARGS="--help")
	@tools/setup.sh prove
	@python3 proofs/prove.py $(PROVE_ARGS)

docs: install  ## Build the documentation site into build/docs/html; fails at a warning or a dead link
	@$(MAKE) --no-print-directory site

# Of the installed package: the tests run this, and must not replace it under each other.
site: .venv/docs.stamp
	@mkdir -p build/docs/doxygen
	@doxygen docs/Doxyfile
	@$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/docs/doctrees docs build/docs/html
	@$(BIN)/python docs/check_links.py build/docs/html

test-docs: docs .venv/test.stamp  ## The same, and run or compile every code block of README and docs/
	@$(NINJA) train_ddp
	@SHARDSTEP_FULL=1 $(BIN)/python -m pytest -q tests/python/docs --deselect tests/python/docs/test_docs.py::test_the_site_builds

# Only our readers are built, with clang; libtorch is linked as it is.
fuzz: .venv/build.stamp  ## Fuzz the readers of files and of the environment for SECONDS=60 of CPU each (FUZZ_ARGS="--help")
	@tools/setup.sh fuzz
	@cmake -S . -B build-fuzz -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DCMAKE_CXX_COMPILER=clang++ -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_PREFIX_PATH=$(abspath .venv/system/usr) -DSHARDSTEP_BUILD_FUZZER=ON \
	  -DSHARDSTEP_BUILD_TESTS=OFF -DSHARDSTEP_BUILD_EXAMPLES=OFF -DSHARDSTEP_BUILD_BENCHMARKS=OFF \
	  > build-fuzz.log 2>&1 || { cat build-fuzz.log; exit 1; }
	@ninja -C build-fuzz -j $(JOBS) shardstep_fuzzer
	@$(BIN)/python tools/fuzz.py --seconds $(SECONDS) $(FUZZ_ARGS)

soak: $(BUILD)/build.ninja  ## Train through kills, delays and restarts for MINUTES=10 (SOAK_ARGS="--seed 1")
	@$(NINJA) train_gpt
	@$(BIN)/python tools/soak.py --build $(BUILD) --minutes $(MINUTES) $(SOAK_ARGS)

format: .venv/format.stamp  ## Format the C++ and Python sources
	@$(BIN)/clang-format -i $(CPP_FILES)
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

check-format: .venv/format.stamp  ## Fail if a source is not formatted
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

check-types: install .venv/test.stamp .venv/types.stamp  ## Fail if a type is wrong, or the stubs differ from the module
	@$(BIN)/mypy --no-error-summary
	@SHARDSTEP_FULL=1 $(BIN)/python -m pytest -q tests/python/test_stubs.py

# The wheel is packed from what is in build/: scikit-build-core finds it configured and built.
# Without its note it never drops the CMake cache, which it would after a change of Python.
install: .venv/python.stamp $(BUILD)/build.ninja  ## Install the Python package into .venv; PREFIX=dir: the C++ one into dir
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
	@rm -rf build build-wheel build-fuzz build-sanitize-* build.log build-*.log dist
