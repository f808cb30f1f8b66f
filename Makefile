# Every target works as the first command after a clone; `make` alone lists them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
JAR    := src/reef/spark/reef-spark.jar
SEED   ?= 0
SEEDS  ?= 20000
STORE  ?= native
LIVES  ?= 3000
JOBS   ?= 2
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help demo test slow check fmt docs replay bench bench-compare soak-rate sim explore soak evidence servers mutants jar java spark-versions clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

demo: $(READY) $(JAR) ## two million orders on Spark, a killed writer, a flipped byte; STORE=s3: on a server
	@$(BIN)/python examples/demo.py --store $(if $(filter s3,$(STORE)),s3,dir)

test: $(READY) servers $(JAR) ## everything a clone needs to pass all tests
	$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder -m "not slow and not quiet"
	$(BIN)/python -m pytest -m quiet

slow: $(READY) servers $(JAR) ## tests that take minutes: kills and speculation on Spark, a short soak
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m tests.lives --seeds $(LIVES)
	$(BIN)/python -m tests.property.damage_machine --seeds $(LIVES)
	$(BIN)/python -m tests.property.damage_machine --seeds $(LIVES) --merges --live-wins
	$(BIN)/python -m pytest -n $(JOBS) --hypothesis-profile=curious $$(grep -rl --include="test_*.py" hypothesis tests)

check: $(READY) ## format, lint, types, imports, links of the site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --quiet --strict

fmt: $(READY) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY) ## rewrite the generated parts of docs/, then build the site in build/site
	$(BIN)/python -m tests.docs.hazard_table
	$(BIN)/python -m tests.docs.picture
	$(BIN)/python -m tests.docs.examples
	$(BIN)/python -m tests.docs.reference
	$(BIN)/mkdocs build --quiet --strict

replay: $(READY) ## every command of README and guides in an empty environment, compared; some minutes
	$(BIN)/python -m tests.docs.replay $(if $(RECORD),--record)

bench: $(VENV)/.bench servers ## benchmarks next to peers, up to half an hour; QUICK=1: some minutes
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick)

bench-compare: $(VENV)/.bench ## the last run next to BASE, a commit or a file of figures
	$(BIN)/python -m benchmarks.regression $(BASE) $(NEW)

sim: $(READY) ## simulate SEEDS seeds of each SCENARIO on JOBS cores; RECORD=1 continues the ledger
	$(BIN)/python -m tests.simulation --seed $(SEED) --seeds $(SEEDS) --store $(STORE) --jobs $(JOBS) \
		$(if $(SCENARIO),--scenario $(SCENARIO)) $(if $(RECORD),--record) $(if $(MINUTES),--minutes $(MINUTES))

mutants: $(READY) servers ## plant every mistake of tests/mutants; ONLY=area or area/id for some
	$(BIN)/python -m tests.mutants --jobs $(JOBS) $(ONLY)

explore: $(READY) ## openings through all orders, deaths and late requests; some hours
	$(BIN)/python -m tests.simulation.exploring

soak: $(READY) servers ## ten minutes of everything, with kill -9, on a real S3 server; STORE as in sim
	$(BIN)/python -m tests.soak --store $(STORE)

soak-rate: $(READY) ## 20 minutes of 1,000 commits a second with a bounded log (H75)
	$(BIN)/python -m tests.soak.commit_rate --url memory://

evidence: $(READY) servers ## full-size versions of what the tests run small, kept in the ledger; ONLY=kills for some
	$(BIN)/python -m benchmarks.evidence $(ONLY)

spark-versions: $(READY) $(JAR) ## the core of Reef on Spark 4.1, 4.2 and 4.3, and without the jar
	$(BIN)/python -m tests.spark.versions

jar: $(JAR) ## compile the native Spark reader

java: $(READY)
	@$(BIN)/python -m tests.support.servers.install java17

$(JAR): jvm/build.py $(wildcard jvm/src/reef/spark/*.java) | $(READY) java
	@$(BIN)/python jvm/build.py $@

servers: $(READY)
	@$(BIN)/python -m tests.support.servers.install

clean: ## remove what make made
	rm -rf $(VENV) .servers build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.bench: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

$(READY): pyproject.toml constraints.txt setup.py src/reef/_kernel.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
