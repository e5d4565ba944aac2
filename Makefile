# Two commands do all the set-up on a machine with nothing but Python: `make demo` and `make test`.
PYTHON ?= python3
JOBS ?= 2
# TORCH=oldest, newest or a version (2.12.0): tests with another torch, in an environment of its own.
TORCH ?=
VENV := $(if $(TORCH),.venvs/torch-$(TORCH),.venv)
BIN := $(VENV)/bin
BENCH := $(VENV)/.bench
READY := $(VENV)/.ready
CONSTRAINTS := $(if $(TORCH),$(VENV).constraints.txt,constraints.txt)

INTEGRATIONS ?= timm lightning transformers hub avalanche optuna ray mammoth flower opacus sb3 tensorboard wandb mlflow

# pip's lines are reduced to the names, and its failure is still that of the command.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
INSTALL = $(BIN)/pip install --disable-pip-version-check --no-compile --progress-bar off -c $(CONSTRAINTS) -e ".[$(EXTRAS)]" \
	| grep --line-buffered -oE '^(Collecting [A-Za-z0-9._-]+|Installing collected packages|Successfully installed)'

.PHONY: demo test test-only test-integrations test-dist lint docs reference tutorials dist release-check figures clean

demo: $(BENCH)
	@$(BIN)/python examples/first_table.py $(if $(DATA),--data-root $(DATA))

test: lint test-only

test-only: $(READY)
	$(BIN)/pytest -n $(JOBS)

# Each framework in an environment of its own, since they may conflict; mammoth also needs CONTNORM_MAMMOTH=<checkout>.
test-integrations:
	$(PYTHON) tests/integrations/environments.py $(INTEGRATIONS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell src tests tools examples docs *.md
	$(BIN)/python tools/check_prose.py

# The site of the documentation, in site/; it needs no network and opens from disk.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The generated pages of docs/reference.
reference: $(READY)
	$(BIN)/python -m tools.reference

# The figures of the documentation, and the parts of README and pages that are made from the records.
figures: $(READY)
	$(BIN)/python -m tools.pages

# Executes the tutorials and stores their outputs; ONLY=slug executes one of them.
tutorials: $(READY)
	$(BIN)/python -m tests.tutorials.notebooks $(ONLY)

# Wheel and sdist, in dist/. Without isolation, setuptools is the one of the environment, so that no network is needed.
dist: $(READY)
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python tools/check_dist.py dist

# The wheel, installed into an empty environment: the library with torch alone, then a run of the benchmark.
test-dist: $(READY)
	$(BIN)/pytest tests/project/test_wheel.py

# Before a release is tagged, and by the release workflow: version, changelog, citation and TAG agree.
release-check:
	$(PYTHON) tools/check_release.py $(TAG)

# Every install goes through constraints.txt; see there why. Another torch has other companions, which pip chooses.
.venvs/torch-%.constraints.txt: constraints.txt pyproject.toml tools/torch_constraints.py
	@mkdir -p .venvs
	@$(PYTHON) tools/torch_constraints.py $* > $@.part && mv $@.part $@

# `make demo` installs what it needs, `make test` the rest, in either order and into the same environment.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("contnorm needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)

$(BENCH): EXTRAS := bench
$(READY): EXTRAS := bench,dev

$(BENCH): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing into $(VENV) (once, about a minute) ..."
	@$(INSTALL)
	@touch $(BENCH)

$(READY): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing into $(VENV) (once, a few minutes) ..."
	@$(INSTALL)
	@touch $(BENCH) $(READY)

clean:
	rm -rf $(VENV) .venvs build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
