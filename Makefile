# make demo   a small version of the rank paper's figure on this machine, in minutes
# make quick  lint, types, and the tests to run while you work: contracts, kernel twins, command line
# make test   lint, types, all tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: demo quick test lint docs package bench clean
demo: $(VENV)/.report
	$(BIN)/headwise run fig1 --preset quick

quick: lint
	$(PYTEST) -m quick

test: lint
	$(PYTEST)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

docs: $(VENV)/.docs
	$(BIN)/python dev/write_cli_reference.py
	$(BIN)/python dev/write_api_reference.py
	$(BIN)/python dev/write_layout.py
	$(BIN)/python dev/build_docs.py

package: $(VENV)/.docs
	$(BIN)/pip install --quiet -c constraints.txt build
	$(BIN)/python dev/check_package.py

bench: $(VENV)/.report
	$(BIN)/python -m benchmarks.quick_grid

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("headwise needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.report: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[report]'
	touch $@

$(VENV)/.docs: $(VENV)/.report
	$(BIN)/pip install --quiet -c constraints.txt -e '.[report,docs]'
	touch $@

$(VENV)/.test: $(VENV)/.report
	$(BIN)/pip install --quiet -c constraints.txt -e '.[report,test]'
	touch $@

clean:
	rm -rf $(VENV) headwise-store
