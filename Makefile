# `make demo` trains a model and writes a report; `make test` proves the library on this machine.

PYTHON ?= python3
# `make test TORCH=2.15.0` tests with another torch, in an environment of its own.
PINNED := 2.13.0
TORCH ?= $(PINNED)
VENV := .venv$(if $(filter-out $(PINNED),$(TORCH)),-$(TORCH))
EXTRA := dev
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH ?= build/benchmarks
# A model that is small enough to learn what code looks like in two minutes on two cores.
DEMO := --model tiny --tokenizer bpe:2048 --optimizer muon --lr 1e-2 --batch 8 --steps 400 \
	--prompt 'class Parser:' --sample-tokens 250
# Tests wait for processes more than they compute: two workers per core keep both cores busy.
WORKERS ?= 4
# `make test TESTS=tests/engine/test_parity.py` runs some of them.
TESTS ?= tests

# Every process that a test starts loads torch. Without byte code on disk it would compile torch's
# sources first, which takes three times as long as loading them.
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/pycache
export PYTHONDONTWRITEBYTECODE :=

.PHONY: env demo test test-all test-soak test-hosts test-clients check bench clean

env: $(STAMP)

# torch goes in first, pinned, by itself: resolved together with the rest, pip may choose another
# build of it, with gigabytes of packages for GPUs. Compiling at the end saves every process that
# a test starts from compiling the same files.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-compile torch==$(TORCH)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	echo torch==$(TORCH) >> $(VENV)/constraints.txt
	$(BIN)/pip install --no-compile -c $(VENV)/constraints.txt -e '.[$(EXTRA)]'
	$(if $(filter 2.14.% 2.15.%,$(TORCH)),$(BIN)/pip install --no-compile spmd_types==0.3.1)
	-$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib/python3*/site-packages/torch \
		$(VENV)/lib/python3*/site-packages/sympy
	touch $@

demo: $(STAMP)
	$(BIN)/fullshard train $(DEMO)

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(TESTS)

# `make test`, and then what takes longer: random programs, documents, commands on a terminal.
test-all: test
	$(BIN)/python -m pytest --exhaustive -m exhaustive --numprocesses $(WORKERS) \
		--dist worksteal $(TESTS)

# What takes minutes each: runs that are killed again and again, and all faults that are known.
test-soak: $(STAMP)
	$(BIN)/python -m pytest --exhaustive --soak -m soak --numprocesses 2 --dist worksteal $(TESTS)

# Everything that happens between hosts, which are namespaces of this machine (as root): faults,
# benchmarks in a small form, and Slurm, where it is installed (Debian: slurm-wlm and munge).
test-hosts: $(STAMP)
	$(BIN)/python -m pytest --exhaustive --soak --numprocesses 2 --dist worksteal tests/hosts

# Frameworks on fullshard beside torch's FSDP, in an environment of its own. A file starts its
# programs once, so the tests of a file stay together.
test-clients:
	$(MAKE) env VENV=.venv-clients EXTRA=clients
	.venv-clients/bin/python -m pytest --numprocesses 2 --dist loadfile tests/clients \
		tests/contract/test_frameworks.py tests/train/test_loggers.py --soak

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(BIN)/python tests/structure.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

# The short set. What is committed in benchmarks/results was measured with the defaults of each.
bench: $(STAMP)
	$(BIN)/python benchmarks/bench_host_time.py --worlds 8 --steps 10 --json $(BENCH)/host_time.json
	$(BIN)/python benchmarks/bench_step.py --sizes 10m --steps 5 --json $(BENCH)/step.json
	$(BIN)/python benchmarks/bench_memory.py --json $(BENCH)/memory.json
	$(BIN)/python benchmarks/bench_collectives.py --sizes-kb 64 1024 16384 --rounds 5 \
		--json $(BENCH)/collectives.json
	$(BIN)/python benchmarks/bench_startup.py --blocks 6 --rank-blocks 2 --json $(BENCH)/startup.json
	$(BIN)/python benchmarks/bench_checkpoint.py --ranks 2 --blocks 18 --json $(BENCH)/checkpoint.json

clean:
	rm -rf $(VENV) .venv-clients build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
