# Needs Python 3.11+, Java 17+ and make; everything else is set up at the first use.
# `make help` lists the targets.

PYTHON ?= python3
WRITER ?= exactly-once
LAKE ?= files
SEEDS ?= 100000
WORKERS ?= 2
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
PYTEST := $(RUN) -m pytest --durations=40 --numprocesses=$(WORKERS) --dist=worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test lint format slow cluster simulate spec mutants bench services lock docs docs-serve release-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## run the main job on real local servers, killed four times (WRITER=naive; LAKE=iceberg|delta)
	$(RUN) -m sparkonce.demo --writer $(WRITER) --lake $(LAKE)

test: $(READY) ## run all tests but the slow ones, on real local servers (WORKERS=0: in one process)
	$(PYTEST) -m "not slow"

slow: $(READY) ## run the slow tests: the full crash matrix (WORKERS=0: in one process)
	$(PYTEST) -m slow

cluster: $(READY) ## run the tests on a Spark standalone cluster, a hundred kills too
	$(PYTEST) integration_tests/cluster -m "slow or not slow"

simulate: $(READY) ## run 100,000 seeds of the protocol's simulation (SEED=n: replay one, with its trace)
	$(RUN) -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

spec: $(READY) ## check every state of the protocol's model, and that each of its guards is needed
	$(RUN) -m specs

mutants: $(READY) ## seed known bugs into a copy of the code, and see that each is found
	$(RUN) -m tests.simulation.mutate

lint: $(READY) ## check style, types, the direction of imports, and the words and links of the documents
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(RUN) -m tests.project.test_words

format: $(READY) ## put the code into its standard form
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

bench: $(READY) ## run every benchmark against the local servers
	for file in $$(ls benchmarks/*.py | grep -v -e harness -e plot); do $(RUN) $$file || exit 1; done
	$(RUN) -m benchmarks.exactly_once

services: $(READY) ## start Kafka, Postgres and S3 on the ports of docker-compose.yml and keep them (KINDS="kafka postgres")
	$(RUN) -m sparkonce.testing.services $(KINDS)

docs: $(READY) ## build the documentation site into build/site; a broken link fails it
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

docs-serve: $(READY) ## show the site on http://127.0.0.1:8000 and rebuild it while you write
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve

release-check: $(READY) ## build the release, and run the README's job from its wheel (DIST=dist: keep the files there)
	$(RUN) -m tests.project.release_check $(DIST)

lock: $(READY) ## write requirements.lock again from pyproject.toml, with the newest versions
	$(VENV)/bin/uv pip compile pyproject.toml --all-extras --group dev --universal \
	  --python-version 3.11 --generate-hashes --no-header --upgrade --output-file requirements.lock

clean: ## remove the virtual environment and what was built
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sparkonce needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=python3.11 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@
