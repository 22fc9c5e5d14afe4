# What a newcomer and CI run. `make` lists the targets. Everything is made in this checkout: .venv, target, dist.

PYTHON ?= python3
STORAGE ?=
ARGS ?=
PYTEST_ARGS ?=

PY := .venv/bin/python
NATIVE := torch_strata/_native.abi3.so
NATIVE_SOURCES := $(shell find native proto -name '*.rs' -o -name '*.toml' -o -name '*.proto') \
	Cargo.toml $(wildcard Cargo.lock) pyproject.toml
# CI builds what was committed; a developer may have just added a crate.
CARGO_FLAGS := $(if $(CI),--locked)
# Two processes by file, so that a server started for a file is started once. Long tests own the machine.
PYTEST_PARALLEL := -n 2 --dist loadfile

# One interpreter for every cargo call, or pyo3 would be built again for each.
export PYO3_PYTHON := $(CURDIR)/.venv/bin/python
# moto runs in it for the conformance tests of the stores.
export STRATA_TEST_PYTHON := $(PYO3_PYTHON)
export VIRTUAL_ENV := $(CURDIR)/.venv
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup setup-dev setup-peers demo test test-long lint format bench wheel lock clean

help:
	@echo "make setup      .venv with torch, the built package and the strata command"
	@echo "make demo       the main job: train, kill, resume, verify; STORAGE=s3://demo/run for S3"
	@echo "make test       everything that matters"
	@echo "make test-long  sweeps, chaos, peers' libraries"
	@echo "make lint       rustfmt, clippy, ruff, mypy, stubtest;  make format  rewrites what they can"
	@echo "make setup-peers  .venv-peers: the trainers that test-long runs"
	@echo "make bench      the table of benchmarks/README.md"
	@echo "make wheel      an abi3 wheel in dist"
	@echo "make lock       requirements/*.txt from pyproject.toml"
	@echo "make clean      removes what the other targets made"

setup: $(NATIVE)

setup-dev: setup .venv/.dev-stamp

setup-peers: setup-dev .venv-peers/.stamp

# On S3 the demo starts moto, which is among the test tools.
demo: setup $(if $(STORAGE),setup-dev)
	@$(PY) examples/demo.py $(if $(STORAGE),--storage $(STORAGE)) $(ARGS)

test: setup-dev
	@cargo test --workspace --quiet $(CARGO_FLAGS)
	@$(PY) -m pytest -q -m "not long" $(PYTEST_PARALLEL) $(PYTEST_ARGS)

test-long: setup-dev setup-peers
	@$(PY) -m pytest -q -m long $(PYTEST_ARGS)

lint: setup-dev
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets --quiet $(CARGO_FLAGS) -- -D warnings
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --quiet --check .
	@$(PY) -m mypy --no-error-summary
	@$(PY) -m mypy.stubtest torch_strata._native --mypy-config-file pyproject.toml
	@echo "lint: clean"

format: setup-dev
	@cargo fmt --all
	@$(PY) -m ruff check --quiet --fix .
	@$(PY) -m ruff format --quiet .

bench: setup-dev
	@$(PY) benchmarks/checkpoint.py $(ARGS)

wheel: setup
	@$(PY) -m maturin build --quiet --release --strip --out dist $(CARGO_FLAGS)
	@ls dist

# uv resolves for every platform at once. Versions already in the lock stay: delete a line to move one.
lock: setup
	@$(PY) -m pip install --quiet uv
	@$(call resolve,build) -o requirements/run.txt
	@$(call resolve,build --group test) -o requirements/dev.txt
	@$(call resolve,build --group test --group peers) --constraint requirements/dev.txt -o requirements/peers.txt

resolve = $(PY) -m uv pip compile --quiet --universal --no-annotate --no-header --no-emit-find-links \
	--python-version 3.11 pyproject.toml --group $(1)

clean:
	@rm -rf .venv .venv-peers target dist .pytest_cache .mypy_cache .ruff_cache $(NATIVE)
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What could be missing is asked for before the large download.
.venv/.run-stamp: requirements/run.txt
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) is missing: install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("torch_strata needs Python 3.11 or newer, but \
	$(PYTHON) is %d.%d: run make setup PYTHON=python3.11" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) has no venv module: install python3-venv"; exit 1; }
	@command -v cargo > /dev/null || { echo "cargo is missing: install a Rust toolchain (https://rustup.rs)"; exit 1; }
	@echo "setup: .venv with torch (about 6 GB)"
	@$(PYTHON) -m venv .venv
	@$(PY) -m pip install --quiet --no-deps -r requirements/run.txt
	@touch $@

.venv/.dev-stamp: requirements/dev.txt .venv/.run-stamp
	@echo "setup: test and lint tools"
	@$(PY) -m pip install --quiet --no-deps -r requirements/dev.txt
	@touch $@

# Looks into .venv after itself, so that torch is there once: what pip finds there it does not install again.
.venv-peers/.stamp: requirements/peers.txt .venv/.dev-stamp
	@echo "setup: trainers to test with (about 250 MB)"
	@rm -rf .venv-peers
	@$(PY) -m venv .venv-peers
	@$(PY) -c 'import site, sys; open(sys.argv[1], "w").write(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")' \
		"$$(.venv-peers/bin/python -c 'import site; print(site.getsitepackages()[0])')/venv.pth"
	@.venv-peers/bin/python -m pip install --quiet --no-deps -r requirements/peers.txt
	@touch $@

$(NATIVE): .venv/.run-stamp $(NATIVE_SOURCES)
	@echo "setup: building the native module"
	@PIP_QUIET=1 $(PY) -m maturin develop --quiet --release $(CARGO_FLAGS)
	@touch $@
