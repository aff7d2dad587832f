# `make demo` trains a model and writes a report; `make test` proves the library on this machine.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: env demo test check bench clean

env: $(STAMP)

# torch goes in first, pinned, by itself: resolved together with the rest, pip may choose another
# build of it, with gigabytes of packages for GPUs.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/fullshard train

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest -q tests/test_imports.py tests/test_public_names.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

bench: $(STAMP)
	@set -e; for program in benchmarks/bench_*.py; do \
		test -e "$$program" || continue; \
		echo "== $$program"; $(BIN)/python "$$program"; \
	done

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
