# Two commands: `make serve` and `make test`. Both make .venv first, both work without a GPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHECKPOINT ?= tests/golden/tiny
HOST ?= 127.0.0.1
PORT ?= 8000

.PHONY: serve test check install clean

serve: install
	$(BIN)/msaserve serve $(CHECKPOINT) --host $(HOST) --port $(PORT)

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

check: install
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

install: $(VENV)/.installed

# Reinstalls only when what is declared has changed.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
