# `make demo` is the tour; `make test` is what a change has to pass. Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.shardrun-ready
QUICK := configs/quickstart.yaml
DEMO := runs/demo

# One thread per process: two ranks on two cores, and sums that do not depend on the machine.
export OMP_NUM_THREADS := 1

.PHONY: help setup demo test lint unit ranks faults long chaos cli hosts cases one coverage clean inner outer fuzz
help:
	@echo "make demo      train on two ranks, stop, resume, inspect, prove the resume"
	@echo "make test      lint, all tests, coverage of the step, records, checkpoint and config rooms"
	@echo "make lint      ruff, mypy --strict, import-linter"
	@echo "make unit      tests without processes;  make ranks: tests on 1 to 4 gloo ranks"
	@echo "make faults    a seeded sample of kills, stops and other faults;  make long: all of them, and what safety costs"
	@echo "make chaos     a hundred random kills, stops and faults of a small run, each gone on from (CYCLES=, SEED=)"
	@echo "make fuzz      a million mutated headers and manifests: read or refused (COUNT=, SEED=)"
	@echo "make one T=tests/unit/test_config_load.py   one file or test, first failure ends it"

setup: $(READY)
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	rm -rf $(DEMO)
	@echo "1. train, stopped after 150 updates (exit 75: saved, safe to start again)"
	$(PY) -m shardrun train $(QUICK) run.dir=$(DEMO) --stop-at 150; test $$? -eq 75
	@echo "2. the same command again goes on from there"
	$(PY) -m shardrun train $(QUICK) run.dir=$(DEMO)
	@echo "3. what a checkpoint holds"
	$(PY) -m shardrun inspect-ckpt $(DEMO)
	$(PY) -m shardrun inspect-ckpt $(DEMO)/checkpoints/step-0000000300 --verify
	@echo "4. stop and resume against never having stopped, bit for bit"
	$(PY) -m shardrun verify-resume $(QUICK)
	@echo "5. the run itself, replayed from one of its checkpoints to the next"
	$(PY) -m shardrun verify-resume $(DEMO)
	@echo "loss curve: $(DEMO)/loss.svg    metrics: $(DEMO)/metrics.jsonl"

test: setup
	@rm -f .coverage .coverage.*
	@$(MAKE) --no-print-directory lint
	@echo "tests, side by side in two halves; what each of them says comes at its end"
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=recurse inner outer
	@$(MAKE) --no-print-directory coverage

# Most tests of ranks and programs wait, for each other or for a timeout: halves of about equal length.
inner: setup
	@$(MAKE) --no-print-directory --jobs=1 unit ranks COV="--cov --cov-append --cov-report="
	@$(MAKE) --no-print-directory --jobs=1 cases

outer: setup
	@$(MAKE) --no-print-directory --jobs=1 faults cli hosts

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

unit ranks faults cli hosts cases: setup
	$(PY) -m pytest -q $(COV) tests/$@ $(AND)

# On a machine without CUDA these are skipped, and say so.
cases: AND := tests/gpu

# Everything of which `make test` runs a sample, and the cost of being fail-closed.
long: setup
	SHARDRUN_LONG=1 $(PY) -m pytest -q tests/ranks tests/cli tests/hosts
	SHARDRUN_LONG=1 $(PY) -m pytest -q tests/faults --long
	$(PY) -m tests.faults.cost
	$(PY) -m tests.checkpoints.kills
	$(PY) -m tests.checkpoints.program_kills
	$(PY) -m tests.checkpoints.cost

# A hundred random ends of a small run, each gone on from: CYCLES, SEED.
chaos: setup
	$(PY) -m tests.faults.chaos --cycles $(or $(CYCLES),100) --seed $(or $(SEED),4)

# A million mutated headers and manifests: COUNT, SEED.
fuzz: setup
	$(PY) -m tests.checkpoints.fuzz --count $(or $(COUNT),1000000) --seed $(or $(SEED),1)

one: setup
	$(PY) -m pytest -x $(T)

# Of the unit and ranks tests: measuring what real programs do would double their time, most of which is the import of torch.
# The ranks that tests start are measured too; the last of them may have left their part behind.
coverage: setup
	@said=$$($(PY) -m coverage combine --append --quiet 2>&1) || \
		case "$$said" in *"No data to combine"*) ;; *) echo "$$said"; exit 1;; esac
	@echo "coverage of the step, records, checkpoint and config rooms, lines and branches:"
	@$(PY) -m coverage report

clean:
	rm -rf build .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
