# make quickstart | test | test-slow | test-docker | nodes | bench | exact | gpu-check | faults | lint | env | lock | clean
# (on a machine with GPUs: make env LOCK=gpu)
SHELL := /bin/bash
VENV ?= .venv
LOCK ?= cpu
STAMP := $(VENV)/.installed-$(LOCK)

.PHONY: env quickstart test test-slow test-docker nodes bench exact gpu-check faults lint lock clean
.DEFAULT_GOAL := quickstart

env: $(STAMP)

$(STAMP): requirements/$(LOCK).txt setup.cfg pyproject.toml scripts/setup_env.sh
	VENV=$(VENV) scripts/setup_env.sh $(LOCK)
	@rm -f $(VENV)/.installed-* && touch $@

quickstart: env
	@scripts/system_deps.sh
	$(VENV)/bin/skyrl train +plugin=thundersync +config=opd/quickstart thundersync.replace_run=true

test: env
	$(VENV)/bin/python -m pytest tests -q

# Whole runs that are killed, stopped and resumed.
test-slow: env
	$(VENV)/bin/python -m pytest tests -q -m slow

# Attacks on sandboxes, on Docker and bubblewrap, with a table of what held. Starts an engine where none answers and it may.
test-docker: env
	@scripts/system_deps.sh
	@scripts/docker_engine.sh up
	@trap 'scripts/docker_engine.sh down' EXIT; \
	    THUNDERSYNC_REQUIRE_DOCKER=1 $(VENV)/bin/python -m pytest tests/sandbox -q

# A Ray cluster over three machines made out of this one (as root, with iproute2; the project not below /tmp).
nodes: env
	@scripts/system_deps.sh
	$(VENV)/bin/python -m pytest tests/nodes -q -m nodes

# One run that learns each batch under three schedules in turn, and the figures that compare them (some ten minutes).
bench: env
	@scripts/system_deps.sh
	$(VENV)/bin/python -m benchmarks.schedules

# Streamed gradients and replayed updates of the quickstart's own batches against plain PyTorch.
exact: env
	@test -d runs/quickstart/record || $(MAKE) quickstart
	$(VENV)/bin/skyrl-thundersync verify runs/quickstart --limit 10

# On one GPU: kernels, streams, an update, publication and the rehearsal against what is measured; a line of JSON a figure.
gpu-check: env
	$(VENV)/bin/python -m benchmarks.gpu_check

# What happens when things break: fault x phase, by real events (as root; a minute or two a cell).
faults: env
	@scripts/system_deps.sh
	$(VENV)/bin/python -m benchmarks.faults

# Style, and who may import whom (pyproject.toml).
lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-cache

# Resolve the locks again, keeping every pin that still fits.
COMPILE = uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes \
	--custom-compile-command "make lock"
lock:
	$(COMPILE) --override requirements/overrides.txt requirements/dev.in -o requirements/cpu.txt
	$(COMPILE) --override requirements/overrides-gpu.txt --constraint requirements/constraints-gpu.txt \
		requirements/gpu.in -o requirements/gpu.txt

clean:
	rm -rf $(VENV) .tools build dist runs *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
