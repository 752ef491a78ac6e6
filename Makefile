# Thin: every target is one command that can also be run by hand.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test test-all test-kubernetes test-slurm-next reclaim-table check format preview pictures dashboards schema bench chart fuzz requirements sbom dist clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: ## install what is missing: Debian packages, .venv
	@$(PYTHON) tools/bootstrap.py

demo: setup ## the main job on a simulated node; KEEP=1 leaves everything up, RULES=FILE tries your own
	@$(BIN)/python -m demo $(if $(KEEP),--keep) $(if $(RULES),--rules $(RULES))

# Many tests wait for real servers: files run side by side, one process more than there are cores.
WORKERS ?= $(shell n=$$(($$(nproc) + 1)); echo $$((n > 4 ? 4 : n)))
test: setup check ## lint, types, layers, and every test
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: test ## test, and what takes longer
	@$(BIN)/python -m pytest -m sweep
	@$(BIN)/python -m demo
	@$(BIN)/python -m bench.exporter.soak --for 300
	@$(BIN)/python -m bench.fuzz --for 600

reclaim-table: setup ## run reclaims of every kind end to end, and print what became of each
	@$(BIN)/python -m tests.system.reclaim_table

test-kubernetes: setup ## build a real kube-apiserver (Debian 12, 8 minutes, once) and compare the fake with it
	@$(BIN)/python tools/kubernetes.py
	@$(BIN)/python -m pytest -m kubernetes tests/ruleengine/reclaim $(ARGS)

test-slurm-next: setup ## scheduling with the Slurm of Debian 13 in a root of its own (needs root; 1 GB, once)
	@$(BIN)/python tools/slurm_next.py -- $(BIN)/python -m pytest -m "sweep or not sweep" tests/scheduling/slurm $(ARGS)

check: setup ## lint, types and layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup ## format the sources
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

preview: setup ## draw the boards in Chromium with Grafana's libraries (npm; 440 MB); SERVE=1 to click
	@$(BIN)/python -m tools.pictures $(if $(SERVE),--serve,boards)

pictures: setup ## remake docs/pictures; KINDS="boards pages" for some of them
	@$(BIN)/python -m tools.pictures $(KINDS)

dashboards: setup ## write grafana/dashboards from code
	@$(BIN)/python -m grafana.build

schema: setup ## write the JSON Schema of rule files
	@$(BIN)/gpuwarden rules schema > ruleengine/schema.json

bench: setup ## the exporter beside nvitop-exporter; ARGS=--quick for three minutes
	@$(BIN)/python -m bench.exporter $(ARGS)

chart: setup ## pack the Helm chart into dist
	@$(BIN)/python tools/charts.py package

fuzz: setup ## attack every parser of what others write; FOR=seconds, ARGS="--of engine"
	@$(BIN)/python -m bench.fuzz --for $(or $(FOR),60) $(ARGS)

requirements: setup ## write what each image installs, pinned with sums (needs PyPI)
	@$(BIN)/python tools/requirements.py

sbom: setup ## write a bill of materials of each image to dist/sbom, and docs/licences.md
	@$(BIN)/python tools/bills.py

dist: setup ## build wheel and sdist
	@$(BIN)/pip wheel -q --no-deps -w dist .

clean: ## remove what the targets made
	rm -rf tools/preview/node_modules tools/preview/dist .venv .bench .demo .fuzz build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
