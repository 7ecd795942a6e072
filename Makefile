# SIE-Stream. `make` alone explains itself.
#
# Needs: Python 3.11+ with venv, and make. No Java, no Maven, no Docker.
#   PYTHON=python3.12 make setup        another interpreter
#   TORCH_WHEELS=dir make setup         take torch from a folder of wheels (a CPU build is 190 MB instead of 4.7 GB)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules

PYTHON ?= python3
TORCH_WHEELS ?= $(wildcard ../shared/wheels)
SEED ?=
SCENARIO ?=
UV_VERSION := 0.13.9
BIN := .venv/bin
PACKAGES := sie_stream topics schemas processors scheduler gpu_worker zoo
CODE := $(PACKAGES) tests

# `make check` is for the minute before a commit: types of what is shipped, few examples for each property.
# `make test` looks at everything.
TYPES = $(PACKAGES)
EXAMPLES = quick
test: TYPES = $(CODE)
test: EXAMPLES = ci

# The slow files of a folder come first (tests/conftest.py), and stay there.
TWO_FILES = -n 2 --dist loadfile --no-loadscope-reorder

# Stamps live inside what they vouch for, so removing an environment removes its stamp.
READY := .venv/.ready
BENCH_READY := .venv-bench/.ready

export UV_PYTHON_DOWNLOADS := never
# Every engine, worker and test process would compile the project again where the caller's shell keeps Python from
# writing what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## This list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  Settings: PYTHON=python3.12  TORCH_WHEELS=dir  SEED=7  SCENARIO=name"

.PHONY: setup
setup: $(READY) ## Create .venv with pinned packages, and fetch Kafka (again only when pins change)

$(READY): pyproject.toml requirements.lock sie_stream/edge/java.py sie_stream/edge/kafka_training.py
	@. .ci/environment.sh
	require_python "$(PYTHON)"
	create_environment "$(PYTHON)" .venv "$(UV_VERSION)"
	say "installing the pinned packages into .venv"
	install_project "$(TORCH_WHEELS)"
	say "preparing the embedded Kafka broker"
	$(BIN)/python -m sie_stream.edge.broker
	touch $@
	say "ready; try: make demo"

.PHONY: models
models: $(READY) ## Train and convert the models of the demo into .models (cached)
	@$(BIN)/python -m zoo.build

.PHONY: demo
demo: models ## The whole system with real models on real Kafka; kills a worker and proves that nothing was lost
	@exec $(BIN)/sie-stream demo

.PHONY: demo-canary
demo-canary: models ## A good, a wrong and a slow version are rolled out under load; only the good one stays
	@exec $(BIN)/sie-stream demo-canary

.PHONY: check
check: $(READY) ## Format, lint, types, unit and architecture tests; about a minute
	@. .ci/environment.sh
	stage "format"; $(BIN)/ruff format --check $(CODE)
	stage "lint"; $(BIN)/ruff check $(CODE)
	stage "types (beside the tests), unit and architecture tests"
	beside "$(BIN)/pyright $(TYPES)" run_tests --hypothesis-profile=$(EXAMPLES) $(TWO_FILES) tests/unit tests/architecture

.PHONY: test
test: check models ## Every test: check, then libraries, decoders, contract, integration, simulation and chaos
	@. .ci/environment.sh
	# Two files at once, each process with a broker of its own. Not chaos: it has the whole machine to hurt.
	for suite in libraries decoders contract integration; do
		stage "$$suite"
		run_tests $(TWO_FILES) "tests/$$suite"
	done
	stage "simulation"; run_tests -n 2 --dist worksteal tests/simulation
	stage "chaos"; run_tests tests/chaos
	say "all stages passed"

.PHONY: test-backends
test-backends: models .venv-triton/.ready .venv-vllm/.ready .venv-sglang/.ready ## Backends against real Triton, vLLM and SGLang on the CPU (6 GB of environments)
	@. .ci/environment.sh
	run_tests tests/backends_real

.venv-%/.ready: tests/backends_real/requirements-%.txt $(READY)
	@. .ci/environment.sh
	say "installing a real $* into .venv-$*"
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python .venv-$*
	with_steps $(BIN)/uv pip install --no-deps $(if $(TORCH_WHEELS),--find-links $(TORCH_WHEELS)) --python .venv-$*/bin/python --requirements $<
	touch $@

.PHONY: format
format: $(READY) ## Format the code and fix what the linter can fix
	@$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

.PHONY: sim
sim: $(READY) ## Deterministic simulation of one world: make sim SEED=7 SCENARIO=worker_kills
	@$(BIN)/python -m sie_stream.sim.main $(if $(SEED),--seed $(SEED)) $(if $(SCENARIO),--scenario $(SCENARIO))

.PHONY: bench
bench: models $(BENCH_READY) ## Measure against raw Kafka clients, Faust and Quix Streams in one run
	@exec $(BIN)/python -m tests.bench.main --peers-python .venv-bench/bin/python

.PHONY: bench-engine
bench-engine: models ## Tokens per second of the decoder engine against transformers in one run
	@exec $(BIN)/python -m tests.bench.engine

$(BENCH_READY): requirements-bench.lock $(READY)
	@. .ci/environment.sh
	say "installing the peers of the benchmark into .venv-bench"
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python .venv-bench
	with_steps $(BIN)/uv pip install --python .venv-bench/bin/python --requirements requirements-bench.lock
	touch $@

.PHONY: lock
lock: $(READY) ## Refresh requirements.lock and requirements-bench.lock from pyproject.toml
	@. .ci/environment.sh
	compile_locks

.PHONY: clean
clean: ## Remove environments, models, state and caches (not the downloads in ~/.cache)
	@rm -rf .venv .venv-bench .venv-triton .venv-vllm .venv-sglang .models .sie .pytest_cache .ruff_cache .hypothesis build dist bench-results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
