# Needs Python 3.11+ and make. Every target creates .venv itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: run test check format setup test-events test-discovery test-engines test-node test-k8s test-supply manifests clean

run: $(VENV)/.demo  ## see warmroute beat round robin on this machine
	$(BIN)/warmroute demo $(ARGS)

test: $(VENV)/.dev  ## the test suite, with coverage of the core
	$(BIN)/python -m pytest -n auto --dist worksteal --cov=router.core --cov-report=term --cov-fail-under=95 $(ARGS)

check: $(VENV)/.dev  ## lint, types, floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev  ## make the linter happy where it can do so itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.dev  ## create .venv with everything

test-events: $(VENV)/.dev  ## ten thousand runs of a model engine and a lossy network against the event stream
	WARMROUTE_KV_RUNS=10000 $(BIN)/python -m pytest tests/core/test_kv_machine.py --timeout=1800 -s $(ARGS)

test-discovery: $(VENV)/.dev  ## ten thousand histories of pods and faults against the view of them, in simulated time
	WARMROUTE_DISCOVERY_RUNS=10000 $(BIN)/python -m pytest tests/discovery/test_histories.py -n auto --timeout=1800 -s $(ARGS)

test-engines: $(VENV)/.dev  ## tests against real vLLM and SGLang on this CPU: 4 GB of disk, some ten minutes
	$(BIN)/python -m tests.engines.install
	$(BIN)/python -m tests.engines.install_sglang
	$(BIN)/python -m pytest tests/engines --timeout=900 -s $(ARGS)

test-node: $(VENV)/.dev  ## the official clients for Node.js against streams that break; needs node and npm
	cd tests/node && npm install --no-audit --no-fund --no-package-lock --loglevel=error
	$(BIN)/python -m pytest tests/node $(ARGS)

test-k8s: $(VENV)/.dev  ## chart, dashboards, rules, a rolling restart: Helm, Prometheus and schemas, no cluster
	$(BIN)/python -m tests.k8s.install
	$(BIN)/python -m pytest tests/k8s --timeout=600 $(ARGS)

test-supply: $(VENV)/.dev  ## locks, reproducible wheel, bill of materials, linted workflows and images
	$(BIN)/python -m tests.supply.install
	$(BIN)/python -m pytest tests/supply --timeout=900 $(ARGS)

manifests: $(VENV)/.dev  ## what is made from the chart and for it: plain manifests, the schema of its values
	$(BIN)/python -m tests.k8s.install
	$(BIN)/python -m deploy.chart_schema
	$(BIN)/python -m deploy.manifests

clean:
	rm -rf .venv-k8s .venv-supply tests/node/node_modules $(VENV) .venv-engines .venv-sglang .venv-rivals

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("warmroute needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@ $(VENV)/.demo
