# make venv | demo | test | lint | bench. Each makes .venv first where it is missing.
PYTHON ?= python3
SHARED ?= $(or $(TREEOPT_SHARED),../shared)
BIN := .venv/bin

.PHONY: venv demo test lint bench clean

# The stamp is remade when the dependencies change, never because the clock moved.
venv: .venv/installed

.venv/installed: pyproject.toml setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "treeopt needs Python 3.11 or newer; run make PYTHON=python3.11")'
	@echo "installing into .venv: about 1.5 GB with a CPU build of torch, several GB where pip offers only CUDA builds"
	@$(PYTHON) -m venv .venv || (echo "on Debian: apt-get install python3-venv" && exit 1)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The whole job on a real model: calibrate, build, render, compile, validate.
demo: venv
	@test -d "$(SHARED)/models" || (echo "make demo needs the shared model; SHARED=FOLDER or TREEOPT_SHARED names it" && exit 1)
	@mkdir -p demo
	$(BIN)/treeopt calibrate --heads $(SHARED)/models/tinystories-260k-medusa --prompts $(SHARED)/data/story_openings.json --limit 128 --max-new-tokens 128 --force -o demo/calibration.safetensors
	$(BIN)/treeopt build --calibration demo/calibration.safetensors --nodes 16 -o demo/tree.yaml
	$(BIN)/treeopt render demo/tree.yaml -o demo/tree.svg
	$(BIN)/treeopt compile demo/tree.yaml -o demo/tree.safetensors
	$(BIN)/treeopt validate --heads $(SHARED)/models/tinystories-260k-medusa --tree demo/tree.yaml --prompts $(SHARED)/data/story_openings.json --limit 16

test: venv
	$(BIN)/python -m pytest

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv
	$(BIN)/python bench/build.py
	$(BIN)/python bench/calibrate.py
	$(BIN)/python bench/decode.py --shared $(SHARED)

clean:
	rm -rf .venv demo dist build treeopt.egg-info
