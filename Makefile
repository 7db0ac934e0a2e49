# make demo   train a small GPT twice, with standard attention and with tilewise, and compare (CPU, minutes)
# make test   lint, types and all tests (CPU)

PYTHON     ?= python3
VENV       ?= .venv
# To use the torch (a CUDA build, say) that is installed already: make VENV_FLAGS=--system-site-packages
VENV_FLAGS ?=
# The torch that was tested; installed only where the environment has none.
TORCH      ?= torch==2.13.0
BIN        := $(VENV)/bin
STAMP      := $(VENV)/.installed
PIP        := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: demo test lint types tests fuzz clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) $(TORCH)
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/tilewise demo

test: lint types tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

tests: $(STAMP)
	$(BIN)/pytest -n 2

# A long local fuzz run: FUZZ=1000 specs.
FUZZ ?= 1000
fuzz: $(STAMP)
	TILEWISE_FUZZ=$(FUZZ) $(BIN)/pytest tests/test_fuzz.py

clean:
	rm -rf $(VENV) runs demo
