# Every target works as the first command after a clone; `make` alone lists them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SEED   ?= 0
SEEDS  ?= 20000
STORE  ?= native
LIVES  ?= 3000
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test slow check fmt bench sim explore soak evidence servers mutants clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

demo: $(READY) ## see what Reef does, in a minute
	@$(BIN)/python examples/demo.py

test: $(READY) servers ## everything a clone needs to pass all tests
	$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder

slow: $(READY) servers ## tests that take minutes: kills and speculation on Spark, a short soak
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m tests.lives --seeds $(LIVES)
	$(BIN)/python -m tests.property.damage_machine --seeds $(LIVES)
	$(BIN)/python -m pytest -n $(JOBS) --hypothesis-profile=curious $$(grep -rl --include="test_*.py" hypothesis tests)

check: $(READY) ## format, lint, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(READY) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.bench servers ## benchmarks, peers side by side
	$(BIN)/python -m benchmarks

sim: $(READY) ## simulate SEEDS seeds, or replay one with SEED=n; STORE=two-phase with a register
	$(BIN)/python -m tests.simulation --seed $(SEED) --seeds $(SEEDS) --store $(STORE)

mutants: $(READY) servers ## plant every mistake of tests/mutants; ONLY=area or area/id for some
	$(BIN)/python -m tests.mutants --jobs $(JOBS) $(ONLY)

explore: $(READY) ## openings through all orders, deaths and late requests; some hours
	$(BIN)/python -m tests.simulation.exploring

soak: $(READY) servers ## ten minutes of everything, with kill -9, on a real S3 server; STORE as in sim
	$(BIN)/python -m tests.soak --store $(STORE)

evidence: $(READY) servers ## full-size versions of what the tests run small, kept in the ledger
	$(BIN)/python -m benchmarks.evidence

servers: $(READY)
	@$(BIN)/python -m tests.servers.install

clean: ## remove what make made
	rm -rf $(VENV) .servers build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.bench: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
