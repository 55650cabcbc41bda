# Commands for a newcomer: `make demo` and `make test`. Both make .venv first. While you write: `make quick`.
# Before a merge: `make gate`, what `make test` leaves out; .ci/run runs all. For maintainers, before a release: `make proof`, `make soak HOURS=8`; `make site` builds the pages, `make docs` the reference alone; `make repro-list` names the public bugs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE_STAMP := $(VENV)/.installed-for-site
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# More workers than cores wait for each other, and each collects all tests.
PYTEST := $(BIN)/python -m pytest -q -n $(shell nproc) --dist worksteal
PROOF := PYTHONPATH=tests $(BIN)/python -m proof
HOURS ?= 1
# A thousand interpreters start in the gate; each would compile the library, and pytest its tests, anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test tests sample gate gate-tests layers lint docs site bench bench-peers device-check device-wheels clean specs proof soak test-integrations try

demo: $(STAMP)
	$(BIN)/ckptfsm demo

quick: $(STAMP)
	$(MAKE) --no-print-directory lint
	$(PYTEST) tests/house tests/unit tests/histories -m "not gate and not megatron"

test: $(STAMP)
	$(MAKE) --no-print-directory lint tests sample

tests: $(STAMP)
	$(PYTEST) -m "not gate"

sample: $(STAMP)
	$(PROOF) --profile sample

# What `make test` leaves out; the layers run whole here.
gate: $(STAMP)
	$(MAKE) --no-print-directory gate-tests layers

gate-tests: $(SITE_STAMP)
	$(PYTEST) -m gate

layers: $(STAMP)
	$(PROOF) --profile pr

# Other versions of megatron-core and of the trainers, each in its own environment. ONLY="ray verl": the
# targets with these words in their names. The newest need python3.12; COMPLETE=1: it must be there.
# WRITE=1: the table of docs/versions.md. DUE=1: those of each change, and those whose integration has changed.
test-integrations: $(STAMP)
	$(BIN)/python tests/integrations/run.py $(ONLY) $(if $(WRITE),--write) $(if $(DUE),--due) $(if $(COMPLETE),--complete)

# What breaks with a new release: `make try CORE=0.20.0`, also TORCH=, NVRX=.
try: $(STAMP)
	$(BIN)/python tests/integrations/run.py --try $(if $(CORE),megatron-core=$(CORE)) \
		$(if $(NVRX),nvidia-resiliency-ext=$(NVRX)) $(if $(TORCH),torch=$(TORCH))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# build/reference.md: every public name, from its docstring.
docs: $(STAMP)
	$(BIN)/python docs/generate_reference.py

# build/site: all pages; a broken link, anchor or entry of the navigation ends it. Needs Python 3.11.
site: $(SITE_STAMP)
	$(BIN)/python docs/generate_site.py
	$(BIN)/python -m zensical build --strict

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# Other writers beside ours; nvidia-resiliency-ext in its own environment.
bench-peers: $(STAMP)
	$(BIN)/python -m benchmarks --only peers
	$(BIN)/python tests/integrations/run.py --bench nvrx-0.7

# On a machine with a GPU, without a network and without .venv: PYTHON is a Python 3.12 with torch and pytest.
# device-wheels brings what else it needs, on a machine with a package index.
device-check:
	$(PYTHON) tests/device_check.py

device-wheels:
	$(PYTHON) tests/device_check.py --fetch

specs: $(STAMP)
	$(BIN)/python specs/generate.py --write

proof: $(STAMP)
	$(PROOF) --profile release --write

# Simulation and kills go on for HOURS each; the thousand re-runs of determinism come on top.
soak: $(STAMP)
	$(PROOF) --profile soak --hours $(HOURS)

repro-%: $(STAMP)
	$(PROOF).fieldbugs $*

$(STAMP): constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) --editable ".[test]"
	touch $(STAMP)

$(SITE_STAMP): $(STAMP)
	$(INSTALL) --editable ".[docs]"
	touch $(SITE_STAMP)

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
