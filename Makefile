# Two commands: `make demo` and `make test`. Both make .venv first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread per process: tests run several ranks side by side.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow test-gpu-image aot venv lint format clean

demo: venv
	$(BIN)/odc-triton demo --out out/demo

# Tests wait for each other's ranks as much as they compute: three side by side keep two cores busy.
test: lint
	$(BIN)/python -m pytest -n 3 -m "not slow and not gpu"

# Then once more what simulates a GPU's streams, as early as they may be: `make test` has them late.
test-slow: venv
	$(BIN)/python -m pytest -m "not gpu"
	ODC_SIMULATED_STREAMS=early $(BIN)/python -m pytest -m "not slow and not gpu" $(shell grep -lr cpu-apart tests --include='test_*.py')

# The tests, without a GPU, under the versions of a machine that has one.
test-gpu-image: .venv-gpu-image/.installed
	.venv-gpu-image/bin/python -m pytest -m "not slow and not gpu"

.venv-gpu-image/.installed: pyproject.toml constraints-gpu-image.txt
	$(PYTHON) -m venv .venv-gpu-image
	.venv-gpu-image/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints-gpu-image.txt --editable ".[test,demo]"
	touch $@

# Machine code of every kernel for every architecture, by both tritons that are supported; needs no GPU.
OTHER_TRITON := out/triton-3.6.0
aot: venv $(OTHER_TRITON)/triton/__init__.py
	env -u TRITON_INTERPRET $(BIN)/python -m bench.aot --also $(OTHER_TRITON)

$(OTHER_TRITON)/triton/__init__.py: | venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OTHER_TRITON) triton==3.6.0

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "odc-triton needs Python 3.10 or newer, and $(PYTHON) is `$(PYTHON) --version`; run: make PYTHON=python3.12 ..."; exit 1; }
	@test "`uname -s`" = Linux || { echo "odc-triton runs on Linux only, not on `uname -s`"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,demo]"
	touch $@

clean:
	rm -rf $(VENV) .venv-gpu-image build out *.egg-info .pytest_cache .ruff_cache .hypothesis
