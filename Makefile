# Two commands do all the set-up on a machine with nothing but Python: `make demo` and `make test`.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

INTEGRATIONS ?= timm lightning transformers hub avalanche optuna ray joblib submitit mammoth tensorboard wandb mlflow

.PHONY: demo test test-integrations lint docs tutorials clean

demo: $(READY)
	@$(BIN)/python examples/first_table.py $(if $(DATA),--data-root $(DATA))

test: lint
	$(BIN)/pytest -n $(JOBS)

# Each framework in an environment of its own, since they may conflict; mammoth also needs CONTNORM_MAMMOTH=<checkout>.
test-integrations:
	$(PYTHON) tests/integrations/environments.py $(INTEGRATIONS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The site of the documentation, in site/; it needs no network and opens from disk.
docs: $(READY)
	$(BIN)/mkdocs build --strict

# Executes the tutorials and stores their outputs; ONLY=slug executes one of them.
tutorials: $(READY)
	$(BIN)/python -m tests.tutorials.notebooks $(ONLY)

# Every install goes through constraints.txt; see there why.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("contnorm needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once, a few minutes) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench,dev]"
	@touch $(READY)

clean:
	rm -rf $(VENV) .venvs build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
