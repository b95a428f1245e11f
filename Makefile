# Everything a newcomer needs: `make demo` and `make test` set up what they use.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
PACKAGES := core protos runtime model_files text engine kv_transfer worker router prefill_worker decode_worker verified_kv vllm_worker fleet tandem_client gateway simulator conformance cli
.DEFAULT_GOAL := help
# The tests start hundreds of processes, each of which would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup tools check test test-main test-kernels vllm test-vllm demo bench bench-engine bench-dataplane bench-transfer bench-goodput bench-vllm bench-operations bench-planner bench-advise bench-peers image clients check-matrix screenshots soak explore protos clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile

# An environment that the caller names by BIN is the caller's to install.
setup: $(if $(filter .venv/bin,$(BIN)),$(INSTALLED))  ## Create .venv with the pinned dependencies

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet 'pip==26.3'
	@# setuptools tells of every editable installation whose packages lie in the root, as ours are meant to
	PYTHONWARNINGS='ignore:Editable installation' \
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,ucxx]'
	@touch $@

tools:  ## Install Chromium, Prometheus, Compose and others for the tests that use them (Debian, root)
	tools/install.sh

check: setup  ## Lint, format, types, and the floors of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES) tests tools benchmarks
	$(BIN)/lint-imports

test: setup  ## The tests but the slow ones of `make soak`, with warnings as errors
	$(BIN)/tandem pull
	$(MAKE) --no-print-directory test-main test-kernels

# In CI, after `make vllm`: of tests/vllm, what starts at most one engine. The others start two or three for minutes.
WITH_VLLM := --override-ini 'norecursedirs=.* node_modules' $(addprefix --ignore tests/vllm/,test_two_pools.py test_tandem_connector.py test_verified_kv.py test_model_families.py)

test-main: setup  ## The tests of `make test` but those of test-kernels
	@# four processes on two cores: one computes, three wait most of the time (tests/support/scheduling.py)
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(if $(CI),--durations=30 $(WITH_VLLM))

test-kernels: setup  ## The GPU kernels under Triton's interpreter, which needs a process of its own, and compiled
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/kernels $(if $(CI),--durations=30)

vllm: setup  ## Install vLLM's CPU build, and the default model for it, under the user's cache (100 s, 4 GB)
	$(BIN)/tandem pull
	$(BIN)/python -m tools.install_peers vllm

test-vllm: vllm  ## The tests of workers with real vLLM inside (8 minutes)
	$(BIN)/python -m pytest -q tests/vllm

demo: setup  ## Three questions through two pools, with a waterfall of each
	$(BIN)/tandem demo

# `make TARGET PARTS="..."` measures a part of it, `make TARGET OPTIONS="..."` gives other options (`--help` lists them).
PARTS_OF = $(if $(PARTS),--parts $(PARTS)) $(OPTIONS)

bench: setup  ## Measure start, memory, latency and throughput of a fleet (2 minutes); PARTS="formats guesses" QUESTIONS=f: JSON schemas, guessed tokens
	$(BIN)/tandem pull
	$(BIN)/python -m benchmarks.fleet $(if $(QUESTIONS),--questions $(QUESTIONS)) $(PARTS_OF)

bench-engine: setup  ## Measure the engine beside vLLM and llama.cpp on one core, and weight formats: TEXT=wiki.test.txt (10 minutes, after bench-peers)
	$(BIN)/tandem pull
	$(BIN)/python -m benchmarks.engine $(if $(TEXT),--text $(TEXT)) $(PARTS_OF)

bench-dataplane: setup  ## Measure the path of a token, gRPC and HTTP, beside bare grpc.aio and Dynamo's frontend (12 minutes)
	$(BIN)/tandem pull
	$(BIN)/python -m benchmarks.dataplane $(PARTS_OF)

bench-transfer: setup  ## Measure the hand-off beside process_vm_readv and ucx_perftest (10 minutes)
	$(BIN)/tandem pull
	$(BIN)/python -m benchmarks.transfer $(PARTS_OF)

bench-goodput: setup  ## Measure requests inside their limits beside the undivided shape and vLLM, live: TRACE=f (30 minutes, after bench-peers)
	$(BIN)/tandem pull
	$(BIN)/python -m benchmarks.goodput $(if $(TRACE),--trace $(TRACE)) $(OPTIONS)

bench-vllm: vllm  ## A worker beside bare AsyncLLM, hand-offs, cancels, prefixes and drains (8 minutes); TRACE=f: goodput beside vLLM alone (50 minutes)
	$(BIN)/python -m benchmarks.vllm $(PARTS_OF)
	$(if $(TRACE),$(BIN)/python -m benchmarks.goodput --systems vllm-1P1D vllm-0P2D vllm 1P1D 0P2D --rates 1 2 3 --trace $(TRACE))

bench-operations: setup  ## Measure what streams feel of rolls, live changes, drains and deaths (15 minutes)
	$(BIN)/tandem pull
	$(BIN)/python -m benchmarks.operations $(PARTS_OF)

bench-planner: setup  ## Compare the planner with fixed sizes and an oracle, in virtual time (half an hour)
	$(BIN)/python -m benchmarks.planner $(if $(TRACES),--traces $(TRACES)) $(PARTS_OF)

bench-advise: setup  ## What `tandem advise` says about published results, in virtual time (two minutes)
	$(BIN)/python -m benchmarks.advise $(PARTS_OF)

bench-peers: setup  ## Install vLLM's CPU build, llama.cpp and Dynamo under the user's cache (7 minutes)
	$(BIN)/tandem pull
	$(BIN)/python -m tools.install_peers

image:  ## Build the image of deploy/ on a base of its own, and let it serve (5 minutes, 10 GB; buildah, debootstrap, root)
	tools/build_image.sh

clients: setup  ## Run OpenAI's clients, vllm bench, aiperf and guidellm against the gateway (10 minutes)
	$(BIN)/tandem pull
	$(BIN)/python -m tools.run_clients

check-matrix: vllm  ## Run `tandem check` against Tandem, Tandem with vLLM inside, and vLLM's own pair: STACKS="float32 vllm-pair" (50 minutes)
	$(BIN)/python -m tools.check_matrix $(if $(STACKS),--stacks $(STACKS)) $(OPTIONS)

soak: setup  ## Send 40,000 requests through faults and rolls, 1,000,000 odd messages, then 5,000 seeds and the slow tests (2.5 hours; SEEDS=100..299: 45 minutes)
	$(BIN)/python -m tools.soak
	$(BIN)/python -m tools.soak --processes
	$(BIN)/python -m tools.fuzz --messages 1000000 --seed $(or $(SEED),2)
	$(BIN)/python -m tools.fuzz --surface costs --messages 10000 --slack 2 --seed $(or $(SEED),2)
	$(BIN)/python -m simulator --seeds $(or $(SEEDS),30..5029)
	$(BIN)/python -m simulator --seeds 15..129 --vllm
	$(BIN)/python -m simulator --seeds 0..99 --disk
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=3000
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=3000 tests/vllm  # skipped without `make vllm`

explore: setup  ## Look for faults with fresh random seeds for five minutes: make explore MINUTES=5
	$(BIN)/python -m tools.explore --minutes $(or $(MINUTES),5)

screenshots: setup  ## Take the dashboard's screenshots of docs/ (2 minutes, needs Chromium)
	$(BIN)/python -m tools.make_screenshots

protos: setup  ## Generate the checked-in stubs again: the public ones for the client, which everybody imports, the others here
	$(BIN)/python -m grpc_tools.protoc -Itandem_client/stubs=protos --python_out=. --pyi_out=. --grpc_python_out=. \
	    $(addprefix tandem_client/stubs/,inference.proto cluster.proto worker.proto)
	$(BIN)/python -m grpc_tools.protoc -I. -Itandem_client/stubs=protos --python_out=. --pyi_out=. protos/handoff.proto protos/kserve.proto
	$(BIN)/python -m grpc_tools.protoc -I. --grpc_python_out=. protos/kserve.proto

clean:  ## Remove what the targets made
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
