# make run    set up and do the main job: train a small BERT with both backends on a text that ships with Python
# make test   set up and run the CPU suite
# make lint   style, types
# make fuzz   the long verification: drawn layers and inputs against float64
# make format rewrite the code in the project's format
# make clean  remove everything that these commands made

VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=
FUZZ_ARGS ?=
RUN_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test lint fuzz format setup clean
.DELETE_ON_ERROR:

setup: $(STAMP)

$(BIN)/python:
	@python=""; \
	for candidate in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "No Python 3.11 or newer was found; set PYTHON to one." >&2; exit 1; fi; \
	if ! "$$python" -m venv "$(VENV)"; then \
	    rm -rf "$(VENV)"; echo "\"$$python -m venv\" failed; set PYTHON to a Python with venv and pip." >&2; exit 1; fi

# Versions are those of constraints.txt. Without build isolation, so that setuptools is a pinned one, too.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

run: $(STAMP)
	$(BIN)/python -m stepdown.pipeline.training.demo $(RUN_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p stepdown
	$(BIN)/mypy tests tools

fuzz: $(STAMP)
	$(BIN)/python -m stepdown.pipeline.verification.fuzz $(FUZZ_ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist runs out .pytest_cache .mypy_cache .ruff_cache .hypothesis .dacecache _dacegraphs
	rm -rf *.egg-info src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
