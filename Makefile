# What a newcomer types: `make serve` or `make test`. Both set up what they need first.
# Needs git, make and Python 3.11 or later; everything else goes into .venv.

VENV := .venv
BIN := $(VENV)/bin
# Extra words for `sparklane serve`, `pytest` or `sparklane bench`.
ARGS ?=
# The first Python that is new enough; pass PYTHON=... to choose.
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python3.14,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED := --require-hashes --no-deps --only-binary :all:

# With more BLAS threads than free cores, a step takes seconds instead of milliseconds.
export OPENBLAS_NUM_THREADS ?= 1

# A process each for two cores: more would load more models than a small machine holds.
IN_PARALLEL := --numprocesses 2 --dist loadscope

.PHONY: setup setup-dev serve test test-system lint format bench lock clean

setup: $(VENV)/.installed
	@$(BIN)/sparklane pull smollm2-135m

setup-dev: setup $(VENV)/.installed-dev

serve: setup
	@exec $(BIN)/sparklane serve $(ARGS)

test: setup-dev
	$(BIN)/python -m pytest --ignore=tests/system $(IN_PARALLEL) $(ARGS)
	@echo
	@echo "Left to 'make test-system', which needs Debian's packages prometheus and systemd:"
	@$(BIN)/python -m pytest --collect-only -q tests/system | sed -n 's/^\(tests.*\)/  \1/p'

test-system: setup-dev
	@for program in promtool prometheus systemd-analyze; do \
		command -v $$program >/dev/null || { \
		echo "$$program is missing; run: apt-get install prometheus systemd" >&2; exit 1; }; \
	done
	$(BIN)/python -m pytest tests/system $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	@$(BIN)/sparklane bench $(or $(ARGS),--help)

# Resolves anew; what is installed stays where pyproject.toml allows it. Needs uv.
lock:
	uv pip compile $(COMPILE) pyproject.toml --output-file requirements.lock
	uv pip compile $(COMPILE) --extra dev --constraint requirements.lock pyproject.toml \
		--output-file requirements-dev.lock

COMPILE := --quiet --no-config --universal --python-version 3.11 --generate-hashes \
	--no-annotate --no-header

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { \
		echo "no Python 3.11 or later was found; pass PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.lock pyproject.toml | $(BIN)/python
	@echo "Installing sparklane and what requirements.lock names"
	@$(INSTALL) $(LOCKED) -r requirements.lock
	@$(INSTALL) --no-deps --editable .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.lock $(VENV)/.installed
	@echo "Installing the tools of requirements-dev.lock"
	@$(INSTALL) $(LOCKED) -r requirements-dev.lock
	@touch $@
