# Needs Python 3.11+ and make. Every target creates .venv itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# If it is set, each process compiles all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run race evidence docs attack test test-compiled compiled coverage check format setup test-events test-discovery test-engines test-node test-browser test-envoy test-k8s test-supply manifests lock sbom dist wheels clean

run: $(VENV)/.demo  ## compare warmroute with round robin on this machine
	$(BIN)/warmroute demo $(ARGS)

# Scenarios: one prefix shared by all requests; results depend on sharing; three times as many shared prefixes as fit; no
# shared prefix. Policies: warm, the router's own, and three others.
RACE := --scenario hot_prefix_long ladder_honest working_set_3x all_unique --load at --seeds 6-7 --policy warm lpwl round_robin least_loaded --check

race: $(VENV)/.demo  ## run and check a small part of the placement race; ARGS="--race --seeds claim --check" runs it all
	$(BIN)/python -m loadtest simulate $(or $(ARGS),$(RACE))

evidence: $(VENV)/.dev  ## run all benchmarks of times and rates into one table: hours; ARGS="--list", "--only cost,demo"
	$(BIN)/python -m loadtest evidence $(ARGS)

# More workers than cores, because many tests wait for sockets and processes.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 4)
NAMED := $(patsubst loadtest/%,tests/loadtest/%,$(patsubst router/%,tests/%,$(ARGS)))

test: $(VENV)/.dev  ## run the suite without long tests; ARGS=router/core/placement tests that package in full, ARGS=tests all
	$(if $(NAMED),,EXAMPLES_PART=0.2) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(or $(NAMED),-m 'not long')

COMPILED_TESTS ?= tests/compiled tests/core tests/admin tests/attack tests/proxy tests/engines tests/extproc tests/http tests/control tests/prewarm tests/ingress tests/telemetry tests/tokenization

test-compiled: .compiled/.made  ## run the core's tests and those over HTTP with the native code of the image
	PYTHONSAFEPATH=1 PYTHONPATH=.compiled:. $(BIN)/python -m pytest --import-mode=append -n auto --dist worksteal $(COMPILED_TESTS) $(ARGS)

compiled: .compiled/.made  ## build .compiled: the router with native code, as in the image; needs a C compiler

.compiled/.made: $(VENV)/.dev deploy/compiled.py deploy/compiled_sources.py $(shell find router -name '*.py')
	rm -rf .compiled.part
	$(BIN)/python -m deploy.compiled .compiled.part --sources
	rm -rf .compiled
	mv .compiled.part .compiled  # atomic: a router that starts in the meantime loads all of it or none
	touch $@

attack: $(VENV)/.attack  ## attack every parser with generated inputs, two minutes each; ARGS="--seconds 600 requests", "--clock", "--coverage"
	-$(MAKE) compiled  # without a C compiler --clock measures Python code
	$(BIN)/python -m tests.attack $(ARGS)

coverage: $(VENV)/.dev  ## check that the core's own tests reach 95 % of its lines
	$(BIN)/python -m pytest -n auto --dist worksteal --cov=router.core --cov-report=term --cov-fail-under=95 tests/core $(ARGS)

check: $(VENV)/.dev  ## check lint, types and layers of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.house.imported_first

format: $(VENV)/.dev  ## format the code and apply automatic lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev  ## build the documentation site in site/; ARGS="serve" shows it during editing
	$(BIN)/python -m mkdocs $(or $(ARGS),build --strict)

setup: $(VENV)/.dev  ## create .venv with all dependencies

help:  ## show this list
	@sed -nE 's/^([a-z0-9-]+):.*  ## (.*)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F '|' '{printf "%-16s %s\n", $$1, $$2}'

EVENT_RUNS ?= 10000
DISCOVERY_RUNS ?= 10000

test-events: $(VENV)/.dev  ## test the event stream in ten thousand runs of a model engine and a lossy network
	WARMROUTE_KV_RUNS=$(EVENT_RUNS) $(BIN)/python -m pytest tests/core/kv_events/test_machine.py --timeout=1800 -s $(ARGS)

test-discovery: $(VENV)/.dev  ## test discovery with ten thousand histories of pods and faults, in simulated time
	WARMROUTE_DISCOVERY_RUNS=$(DISCOVERY_RUNS) $(BIN)/python -m pytest tests/engines/discovery/test_histories.py -n auto --timeout=1800 -s $(ARGS)

test-engines: $(VENV)/.dev  ## test against real vLLM and SGLang on this CPU: 5 GB of disk, about twenty minutes
	$(BIN)/python -m tests.real.install
	$(BIN)/python -m tests.real.install_sglang
	$(BIN)/python -m tests.real.install_litellm
	$(BIN)/python -m pytest tests/real --timeout=900 -s $(ARGS)

test-node: $(VENV)/.dev  ## test the official clients for Node.js with streams that break; needs node and npm
	cd tests/node && npm install --no-audit --no-fund --no-package-lock --loglevel=error
	$(BIN)/python -m pytest tests/node $(ARGS)

test-browser: $(VENV)/.browser  ## test the dashboard in Debian's chromium; needs chromium, chromium-driver, node and npm
	cd tests/browser && npm install --no-audit --no-fund --no-package-lock --loglevel=error
	$(BIN)/python -m pytest tests/browser --timeout=180 $(ARGS)

test-k8s: $(VENV)/.dev  ## test chart, dashboards, rules, a rolling restart: Helm, Envoy, Prometheus and schemas, no cluster
	$(BIN)/python -m tests.k8s.install
	$(BIN)/python -m tests.envoy.install
	$(BIN)/python -m pytest tests/k8s --timeout=600 $(ARGS)

test-supply: $(VENV)/.dev  ## test locks, reproducible wheel and bill of materials; lint workflows and images
	$(BIN)/python -m tests.supply.install
	$(BIN)/python -m pytest tests/supply --timeout=900 $(ARGS)

test-envoy: $(VENV)/.dev  ## test the picker behind a real Envoy, which needs 107 MB of disk
	$(BIN)/python -m tests.envoy.install
	$(BIN)/python -m pytest tests/envoy --timeout=600 $(ARGS)

manifests: $(VENV)/.dev  ## generate plain manifests from the chart, and its schema of values and gateway rules
	$(BIN)/python -m tests.k8s.install
	$(BIN)/python -m deploy.chart_schema
	$(BIN)/python -m deploy.gateway
	$(BIN)/python -m deploy.manifests
# Only wheels, so that no code of a package runs during the build of the image.
LOCK := .venv-supply/bin/uv pip compile --quiet --python-platform x86_64-manylinux_2_28 --python-version 3.11 \
	--generate-hashes --only-binary :all: --no-emit-index-url --custom-compile-command 'make lock' $(ARGS)

lock: $(VENV)/.dev  ## write requirements/*.lock from pyproject.toml; ARGS=--upgrade takes the newest versions
	$(BIN)/python -m tests.supply.install
	$(LOCK) requirements/build.in -o requirements/build.lock
	$(LOCK) pyproject.toml --extra gateway --extra kubernetes --extra shared --extra tokenizers --extra tracing --extra demo -o requirements/demo.lock
	$(LOCK) requirements/native.in -c requirements/build.lock -c requirements/demo.lock -o requirements/native.lock
	$(LOCK) pyproject.toml --extra gateway --extra kubernetes --extra shared --extra tokenizers --extra tracing -c requirements/demo.lock -o requirements/image.lock
	$(LOCK) pyproject.toml -c requirements/demo.lock -o requirements/runtime.lock

sbom: $(VENV)/.dev  ## write dist/warmroute-*.cdx.json: the bill of materials of the image, as CycloneDX
	$(BIN)/python -m tests.supply.install
	.venv-supply/bin/python -m deploy.sbom requirements/image.lock dist

dist: $(VENV)/.dev  ## build wheel and sdist in dist/, with the same bytes on every machine
	$(BIN)/python -m tests.supply.install
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} .venv-supply/bin/python -m deploy.dist dist

wheels: $(VENV)/.dev  ## build a native wheel in dist/ for each Python here; ARGS="--python PATH ..." adds more, --all requires all
	$(BIN)/python -m tests.supply.install
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} .venv-supply/bin/python -m deploy.wheels dist $(ARGS)

clean:  ## remove .venv and all other files that targets created
	rm -rf .compiled .compiled.part .venv-envoy .venv-k8s .venv-supply tests/node/node_modules tests/browser/node_modules $(VENV) .venv-engines .venv-sglang .venv-rivals
	rm -rf site

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("warmroute needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --upgrade 'pip>=25.1'  # older versions need twice the CPU to install

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[dev]'
	touch $@ $(VENV)/.demo

$(VENV)/.attack: pyproject.toml | $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[attack]'
	touch $@

$(VENV)/.browser: pyproject.toml | $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable '.[browser]'
	touch $@
