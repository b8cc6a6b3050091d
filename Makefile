# make venv | demo | test | lint | bench | pocket. Each makes .venv first where it is missing.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
SHARED ?= $(or $(TREEOPT_SHARED),../shared)
WORKERS ?= 2
BIN := .venv/bin

.PHONY: venv demo pocket test lint bench clean

# The stamp is remade when the dependencies or the set of versions change, never because the clock moved.
# CONSTRAINTS=constraints-min.txt installs the lowest versions instead; what pip put there before is replaced.
venv: .venv/installed

.venv/installed: pyproject.toml setup.cfg $(CONSTRAINTS) .venv/constraints-$(notdir $(CONSTRAINTS))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "treeopt needs Python 3.11 or newer; run make PYTHON=python3.11")'
	@echo "installing into .venv: about 1.5 GB with a CPU build of torch, several GB where pip offers only CUDA builds"
	@$(PYTHON) -m venv .venv || (echo "on Debian: apt-get install python3-venv" && exit 1)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

# Which set was installed: another name is another file, which is newer than the stamp.
.venv/constraints-%:
	@mkdir -p .venv && rm -f .venv/constraints-* && touch $@

# The whole job on the built-in model: calibrate, build, render, compile, validate.
demo: venv
	$(BIN)/treeopt demo

# Makes the built-in model again, in pocket-made/ (an hour or two on two cores); treeopt/data/pocket/README.md says what it is.
pocket: venv
	$(BIN)/python -m treeopt.train.pocket calibration/recipes/pocket.yaml pocket-made

# Two processes, each with whole test files: models that the tests of a file share are loaded once. WORKERS=0: one process.
test: venv
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv
	$(BIN)/python bench/build.py
	$(BIN)/python bench/calibrate.py
	$(BIN)/python bench/decode.py --shared $(SHARED)

clean:
	rm -rf .venv demo pocket-made dist build treeopt.egg-info
