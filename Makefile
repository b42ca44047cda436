# `make run` and `make test` set everything up on a fresh machine; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The longest first.
TORTURE := tests/engines/flower/test_kills_flower.py $(addprefix tests/torture/test_, \
	soak.py random_kills.py crash_points.py fuzzing.py hostile.py signals.py many_clients.py)
WEB := tests/torture/test_web_load.py
# The lowest versions of all dependencies but torch, and what is run with them: each dependency is used in one of these.
LOWEST := .venv-lowest
BOUNDED := $(addprefix tests/, data/test_table_data.py environment/test_budget.py plan/test_plan_file.py report/test_labels.py \
	report/test_tables.py report/test_terminal.py runs/test_export.py trackers/test_trackers.py watch/test_watch_server.py \
	cli/test_comparison.py)

.PHONY: help run test test-slow torture check format bench bench-smoke flower-newest docs docs-serve lower-bounds package page clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

run: $(VENV)/ready ## Install, then watch a federation go wrong, be caught and mended
	$(BIN)/lindt demo

test: $(VENV)/ready ## The quick suite
	$(BIN)/python -m pytest -n 2

test-slow: $(VENV)/slow ## What takes longer: trackers, the page in a browser (apt-get install chromium), rebuilding it
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow and not torture'

torture: $(VENV)/torture ## Kills, faults, fuzzing, long runs: more than half an hour; FUZZ_SECONDS=60 a parser
	$(BIN)/python -m pytest -n 2 -rP -m 'slow or torture' $(TORTURE) > torture.log 2>&1; code=$$?; \
	$(BIN)/python -m pytest -n 0 -rP -m torture $(WEB) >> torture.log 2>&1 && test $$code = 0; code=$$?; \
	grep -ao 'FIGURE.*' torture.log; tail -3 torture.log; exit $$code

check: $(VENV)/ready ## Format, lint, strict types, quick suite: what CI runs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

format: $(VENV)/ready ## Format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/ready ## Ourselves and the peers on the same work (about half an hour)
	$(BIN)/python benchmarks/run.py

bench-smoke: $(VENV)/ready ## A tiny pass of the benchmark: fails on breakage, not on time
	$(BIN)/python benchmarks/run.py --smoke

flower-newest: $(VENV)/ready ## The quick Flower tests with the newest flwr that installs, in an environment of its own
	$(BIN)/python tests/flower/newest.py

docs: $(VENV)/docs ## Build the documentation as a site into site/; a dead link or a missing reference fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-serve: $(VENV)/docs ## Serve the documentation on 127.0.0.1:8000, and build it anew when a page is saved
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8000 --watch src --watch docs/generate

lower-bounds: $(LOWEST)/ready ## Quick tests with the lowest versions that pyproject.toml allows, in an environment of its own
	$(LOWEST)/bin/python -W ignore -m pytest -p no:cacheprovider -o filterwarnings=default $(BOUNDED)

package: $(VENV)/ready ## Build wheel and sdist into dist/
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --no-isolation --outdir dist .

page: ## Build the page of `lindt report` and `lindt watch` anew from its source (needs npm)
	PYTHONPATH=src $(PYTHON) -m lindt.report.typescript
	npm --prefix src/lindt/report/page ci
	npm --prefix src/lindt/report/page run check
	npm --prefix src/lindt/report/page run build

clean: ## Remove the environment, caches and runs
	rm -rf $(VENV) $(LOWEST) site runs torture.log build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch first and alone: an unpinned torch would bring gigabytes for accelerators.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

$(VENV)/slow: $(VENV)/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,slow]'
	@touch $@

$(VENV)/docs: $(VENV)/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,docs]'
	@touch $@

$(LOWEST)/ready: pyproject.toml constraints.txt .ci/lowest.py
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) .ci/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet -c constraints.txt torch setuptools
	$(LOWEST)/bin/python -m pip install --quiet -c constraints.txt -c $(LOWEST)/constraints.txt --no-build-isolation \
		-e '.[simulation,page,figures,parquet,tensorboard]' pytest hypothesis pyyaml
	@touch $@

$(VENV)/torture: $(VENV)/slow
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,slow,torture]'
	@touch $@
