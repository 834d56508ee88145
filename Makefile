# Everything happens in .venv (that of other engines in .venv-engines), which the targets make and fill on their own; nothing else is touched.
# The stamps under .venv let a second `make` start at once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
ENGINES ?= .venv-engines
FLOWER ?= .venv-flower
FEDBIOMED ?= .venv-fedbiomed
DEMO   ?= fedclip-demo
JOBS   ?= 2

BIN := $(VENV)/bin
PY  := $(BIN)/python
# The newest versions have pins of their own, for Python 3.13 or later.
PINS  := $(shell $(PYTHON) -c 'import sys; print("constraints-3.13.txt" if sys.version_info >= (3, 13) else "constraints.txt")')
TORCH := $(shell grep -E '^torch==' $(PINS))
PIP := $(PY) -m pip install --disable-pip-version-check --quiet -c $(PINS)
# The first version that installs dependency groups.
NEWPIP := 'pip>=25.1'

# Tests that need Flower or NVFlare.
OTHERS := tests/engines/flower tests/engines/nvflare tests/engines/together

.DEFAULT_GOAL := help
.PHONY: help demo quick test engines engines-soak flower fedbiomed soak matrix extras lint format docs site bench build dist clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.demo  ## train over three hospitals, with and without clipping; write a table and a plot
	$(BIN)/fedclip demo $(DEMO)

# Modules are compiled once, not in each of the many processes that tests start.
quick test soak: export PYTHONDONTWRITEBYTECODE =

# The laws, and the units of the rooms that they stand on.
QUICK := tests/laws $(addprefix tests/units/,core rules transforms arrays clippers privacy updates)

quick: $(VENV)/.dev  ## run the laws on a sample of clippers, NumPy and torch, and the units of the core, in half a minute
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m "not slow and not soak" --backends numpy,torch $(QUICK)

test: $(VENV)/.dev  ## run the whole test suite
	# One more, as many of these tests wait for processes and sockets.
	$(PY) -m pytest -n $$(($(JOBS) + 1)) --dist worksteal

engines: $(ENGINES)/.made  ## run the tests on Flower and NVFlare, which have an environment of their own
	$(ENGINES)/bin/python -m pytest -n $(JOBS) --dist worksteal \
	  $(OTHERS) fedclip/engines/flower fedclip/engines/nvflare

flower: $(FLOWER)/.made  ## run the tests of Flower on its newest version; `make engines` runs the oldest
	$(FLOWER)/bin/python -m pytest -n $(JOBS) --dist worksteal \
	  tests/engines/flower fedclip/engines/flower

fedbiomed: $(FEDBIOMED)/.made  ## run the tests on Fed-BioMed, which has an environment for itself (Python 3.11)
	$(FEDBIOMED)/bin/python -m pytest tests/engines/fedbiomed

engines-soak: $(ENGINES)/.made  ## run the longer tests on Flower and NVFlare, and attacks on a site's policy
	$(ENGINES)/bin/python -m pytest -m soak $(OTHERS)

soak: $(VENV)/.dev engines-soak  ## run searches and audits that take an hour or two
	$(PIP) --group oracle
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m soak
	$(MAKE) matrix

matrix: $(VENV)/.dev  ## run faults against all tests that run the changed lines; you can interrupt and repeat it
	$(PIP) --group mutants
	test -e build/matrix/coverage || $(PY) tests/matrix.py coverage
	$(PY) tests/matrix.py

extras: $(VENV)/.dev  ## install the wheel with each extra into an environment of its own
	$(PY) -m pytest -m soak tests/project/test_wheel.py

lint: $(VENV)/.dev  ## check format, style, types and prose
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(PY) -m pytest -q tests/project/test_prose.py

format: $(VENV)/.dev  ## rewrite the files in the format that lint asks for
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(VENV)/.dev  ## write what the documentation takes from the code
	$(PY) docs/pictures.py
	$(PY) docs/clippers.py
	$(PY) docs/parts.py
	$(PY) docs/public_names.py

site: $(VENV)/.dev  ## build the site of the documentation; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.dev  ## measure the clippers against declearn's own
	$(PY) -m benchmarks

build: $(VENV)/.dev  ## build the wheel and the source archive into dist/
	$(PY) -m hatchling build

# A package index shows the README without the files next to it: its links need REPOSITORY.
dist: $(VENV)/.made  ## build a release into dist/ and check it; with REPOSITORY=URL the README links there
	$(PIP) --group release
	rm -rf build/release dist && mkdir -p build/release
	git archive HEAD | tar -x -C build/release
	test -z "$(REPOSITORY)" || sed -E -i -e 's#\]\(([^):\#]+\.png)\)#](\1?raw=true)#g' \
	  -e 's#\]\(([^):\#][^):]*)\)#]($(REPOSITORY)/\1)#g' build/release/README.md
	cd build/release && $(abspath $(PY)) -m build --outdir $(CURDIR)/dist .
	$(PY) -m twine check --strict dist/*

clean:  ## remove .venv and everything the targets wrote
	rm -rf $(VENV) $(ENGINES) $(FLOWER) $(FEDBIOMED) $(DEMO) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fedclip needs Python 3.11 or later; name one with: make PYTHON=python3.x" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(NEWPIP)
	@touch $@

# The demo needs declearn, which brings scikit-learn and its data, and matplotlib.
$(VENV)/.demo: $(VENV)/.made pyproject.toml $(PINS)
	@echo "installing fedclip into $(VENV)"
	$(PIP) -e '.[cli,plot]'
	@touch $@

# torch goes first, alone and pinned: left to the resolver as somebody's dependency,
# it may come in a build for GPUs, which is several gigabytes larger.
$(VENV)/.dev: $(VENV)/.made pyproject.toml $(PINS)
	@echo "installing fedclip, the frameworks and the test tools into $(VENV)"
	$(PIP) $(TORCH)
	$(PIP) -e '.[all,lightning,transformers]' --group dev
	@touch $@ $(VENV)/.demo

# Flower wants older versions of what fedclip's other tests use. Nothing is told of these runs.
export FLWR_TELEMETRY_ENABLED = 0
export RAY_USAGE_STATS_ENABLED = 0

$(ENGINES)/.made: pyproject.toml constraints-engines.txt
	@echo "installing fedclip, Flower and NVFlare into $(ENGINES)"
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --disable-pip-version-check --quiet $(NEWPIP)
	$(ENGINES)/bin/python -m pip install --disable-pip-version-check --quiet \
	  -c constraints-engines.txt -e '.[cli,flower,nvflare]' --group test
	@touch $@

$(FLOWER)/.made: pyproject.toml constraints-flower.txt
	@echo "installing fedclip and the newest Flower into $(FLOWER)"
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --disable-pip-version-check --quiet $(NEWPIP)
	$(FLOWER)/bin/python -m pip install --disable-pip-version-check --quiet \
	  -c constraints-flower.txt -e '.[cli,flower]' --group test
	@touch $@

# Fed-BioMed needs Python 3.11 and declearn 2.8.
$(FEDBIOMED)/.made: pyproject.toml constraints-fedbiomed.txt
	@echo "installing fedclip and Fed-BioMed into $(FEDBIOMED)"
	$(PYTHON) -m venv $(FEDBIOMED)
	$(FEDBIOMED)/bin/python -m pip install --disable-pip-version-check --quiet $(NEWPIP)
	$(FEDBIOMED)/bin/python -m pip install --disable-pip-version-check --quiet \
	  -c constraints-fedbiomed.txt -e '.[cli,fedbiomed]' --group test
	@touch $@
