# make demo   train a small GPT twice, with standard attention and with tilewise, and compare (CPU, minutes)
# make test   lint, types and all tests (CPU)
# make report the stored pages of benchmarks/results, drawn anew

PYTHON     ?= python3
VENV       ?= .venv
# To use the torch (a CUDA build, say) that is installed already: make VENV_FLAGS=--system-site-packages
VENV_FLAGS ?=
# The torch that was tested; installed only where the environment has none.
TORCH      ?= torch==2.13.0
BIN        := $(VENV)/bin
STAMP      := $(VENV)/.installed
PIP        := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test test-gpu lint types tests browser report triton triton-newest fuzz clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) $(TORCH)
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/tilewise demo

test: lint types tests triton triton-newest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

tests: $(STAMP) browser
	$(BIN)/pytest -n 2

# Reports are looked at in a headless Chromium: installed where it is missing and may be, as root on Debian and its kin.
# Without one their test is skipped with the reason; in CI it fails.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			chromium fonts-dejavu-core >/dev/null || echo "Chromium could not be installed: its test will say so"; \
	else \
		echo "no Chromium here, and no right to install it: the report's test will be skipped"; \
	fi

# The Triton kernels without a GPU: bodies run by its interpreter, and kernels compiled for the GPUs they ship for.
# They need the Triton that was tested, which may not be the one of the user's torch: an environment of their own.
TRITON_VENV := $(VENV)-triton
TRITON_BIN  := $(TRITON_VENV)/bin
TRITON_PYTEST := $(TRITON_BIN)/pytest -n 2 --rootdir tests/triton_lanes --confcutdir tests/triton_lanes

$(TRITON_VENV)/.installed: pyproject.toml constraints-triton.txt
	$(PYTHON) -m venv $(TRITON_VENV)
	$(TRITON_BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(TRITON_BIN)/pip install --quiet --disable-pip-version-check -c constraints-triton.txt \
		triton pytest pytest-xdist hypothesis -e .
	touch $@

triton: $(TRITON_VENV)/.installed
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(TRITON_PYTEST) tests/triton_lanes/test_interpret*.py tests/triton_lanes/test_decode.py \
		tests/triton_lanes/test_lab.py
	$(TRITON_PYTEST) tests/triton_lanes/test_compile.py tests/triton_lanes/test_gluon_*.py tests/triton_lanes/test_replay.py \
		tests/triton_lanes/test_lab.py tests/triton_lanes/test_lower.py

# And that kernels for Hopper compile with the newest Triton that was looked at.
NEWEST_VENV := $(VENV)-newest

$(NEWEST_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(NEWEST_VENV)/bin/pip install --quiet --disable-pip-version-check triton==3.9.0 pytest pytest-xdist hypothesis -e .
	touch $@

triton-newest: $(NEWEST_VENV)/.installed
	$(NEWEST_VENV)/bin/pytest -n 2 --rootdir tests/triton_lanes --confcutdir tests/triton_lanes tests/triton_lanes/test_gluon_*.py

# On a machine with a GPU, with the torch that is installed there (and pytest, pytest-xdist, hypothesis): everything that has
# to hold on it, into one report. Interrupted or called again for the same source, it goes on with what has not passed.
GPU_REPORT ?= benchmarks/results/tests-gpu.json
GPU_JOBS   ?= 16
GPU_PYTHON := PYTHONPATH=src $(PYTHON)
test-gpu:
	status=0; \
	$(GPU_PYTHON) tests/gpu/report.py --json $(GPU_REPORT) -n $(GPU_JOBS) tests/test_conformance.py -k "gluon or triton" \
		|| status=1; \
	$(GPU_PYTHON) tests/gpu/report.py --json $(GPU_REPORT) -n $(GPU_JOBS) tests/gpu || status=1; \
	$(GPU_PYTHON) tests/gpu/sanitize.py --json $(GPU_REPORT) --jobs $(GPU_JOBS) --tool memcheck --cases all || status=1; \
	$(GPU_PYTHON) tests/gpu/sanitize.py --json $(GPU_REPORT) --jobs $(GPU_JOBS) --tool racecheck --cases small || status=1; \
	exit $$status

# The stored pages, anew from the stored results: one of CPUs and of what is computed, one of the H200.
RESULTS := benchmarks/results
REPORT  := $(BIN)/tilewise report
report: $(STAMP)
	$(REPORT) $(wildcard $(RESULTS)/*cpu*.json) $(filter-out $(wildcard $(RESULTS)/*measured*),$(wildcard $(RESULTS)/io-*.json)) \
		-o $(RESULTS)/report-cpu --json $(RESULTS)/report-cpu/report.json
	test ! -d $(RESULTS)/report-h200 || $(REPORT) $(wildcard $(RESULTS)/*h200*.json) \
		-o $(RESULTS)/report-h200 --json $(RESULTS)/report-h200/report.json

# A long local fuzz run: FUZZ=1000 specs.
FUZZ ?= 1000
fuzz: $(STAMP)
	TILEWISE_FUZZ=$(FUZZ) $(BIN)/pytest tests/test_fuzz.py

clean:
	rm -rf $(VENV) $(TRITON_VENV) $(NEWEST_VENV) runs demo build
