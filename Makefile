# Two commands: `make serve` and `make test`. Both make .venv first, both work without a GPU.
# `make eval` asks the small trained checkpoint, or CHECKPOINT=DIR, questions of every skill.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHECKPOINT ?= checkpoints/tiny
HOST ?= 127.0.0.1
PORT ?= 8000

.PHONY: serve test eval check install clean

serve: install
	$(BIN)/msaserve serve $(CHECKPOINT) --host $(HOST) --port $(PORT)

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

eval: install
	$(BIN)/python -m examples.train_tiny.evaluate --checkpoint $(CHECKPOINT) --out build/eval --processes 2

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
