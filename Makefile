# make demo   train a small GPT twice, with standard attention and with tilewise, and compare (CPU, minutes)
# make test   lint, types and all tests (CPU)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint types tests fuzz clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
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
	$(BIN)/pytest

# A long local fuzz run: FUZZ=1000 specs.
FUZZ ?= 1000
fuzz: $(STAMP)
	TILEWISE_FUZZ=$(FUZZ) $(BIN)/pytest tests/test_fuzz.py

clean:
	rm -rf $(VENV) runs demo
