# Two commands: `make demo` and `make test`.  Each makes its own .venv and installs what it needs.
VENV ?= .venv
PARITY ?= .venv-parity
PYTHON ?= python3
PEERS := speculators==0.9.0 hs-connectors==0.9.0 dflash==0.1.0 specforge==0.2.0
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint types doctest notebooks parity clean

demo: $(VENV)/.core
	$(BIN)/specjax demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not parity"

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/pyright --pythonpath $(BIN)/python

doctest: $(VENV)/.test
	$(BIN)/python -m pytest --doctest-modules specjax

parity: $(PARITY)/.parity $(PARITY)/.peers
	$(PARITY)/bin/python -m pytest -n 2 --dist worksteal -m parity tests/parity

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip

$(VENV)/.core: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e ".[test,dev]"
	touch $@ $(VENV)/.core

# torch first: elsewhere take its CPU wheel (an index of its own) if a CUDA build of several GB is too much
$(PARITY)/.parity: pyproject.toml
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install -q --upgrade pip
	$(PARITY)/bin/python -m pip install -q "torch==2.13.0"
	$(PARITY)/bin/python -m pip install -q -e ".[test,parity]"
	touch $@

# --no-deps: they ask for engines and for older transformers, which what is compared does not use
$(PARITY)/.peers: $(PARITY)/.parity
	if $(PARITY)/bin/python -m pip install -q loguru pydantic-settings openai datasets && \
	   $(PARITY)/bin/python -m pip install -q --no-deps $(PEERS); then touch $@; \
	else echo "$(PEERS) cannot be installed here: live tests against them will be skipped"; fi

clean:
	rm -rf $(VENV) $(PARITY) build *.egg-info .pytest_cache .ruff_cache .hypothesis
