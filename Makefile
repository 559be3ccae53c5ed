# Needs Python 3.11 or later, make and bash. `make PYTHON=python3.12 setup` picks the interpreter.
SHELL := bash
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# One thread for each of the two test workers, so that they do not fight over two cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint kernels campaign report docs site clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## a virtual environment in .venv with the package and its tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "relaylm needs Python 3.11 or later, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 setup")'
	@test -x $(BIN)/python || { echo "Creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "Installing relaylm and its dependencies into .venv (minutes the first time, torch is large)"
	@set -o pipefail; PYTHONUNBUFFERED=1 $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
		-c constraints.txt -e ".[dev,report,cluster,serve]" | { while read -r _; do printf .; done; echo; }
	@touch $@
	@echo "Ready: $(BIN)/relaylm --help"

demo: setup ## the same prompt in 64 steps, in spaced calls, and with two networks
	$(BIN)/relaylm demo

lint: setup ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## style, types and the quick tests
	$(PYTEST)

test-all: lint ## the same with the slow tests
	$(PYTEST) -m ""

kernels: setup ## the CUDA kernels without a GPU: interpreted, and compiled for two kinds (Linux; installs Triton)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[kernels]"
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels/test_fused.py
	$(PYTEST) tests/kernels/test_compiled.py

campaign: setup ## kills, faults, fuzz, laws, soak, supply: minutes to hours, results/campaigns
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[campaign,serve]"
	@for name in supply laws kills faults fuzz soak; do $(BIN)/python tests/campaigns/$$name.py $(CAMPAIGN) || failed=1; done; exit $${failed:-0}

report: setup ## the paper's report from the data in results/reproduce, then the documents
	rm -rf results/reproduce/figures results/reproduce/tables
	$(BIN)/python -c "from pathlib import Path; from relaylm.studies.paper.reproduce import report; report(Path('results/reproduce'), records=Path('results'))"
	$(MAKE) docs

docs: setup ## the generated parts of README.md and docs/, and the site in build/site
	$(BIN)/python docs/generate.py
	$(MAKE) site

site: setup ## the documentation site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open build/site/index.html, or run $(BIN)/mkdocs serve"

clean: ## remove .venv, caches and build outputs
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find relaylm tests -name __pycache__ -type d -prune -exec rm -rf {} +
