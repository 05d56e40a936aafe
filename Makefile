# make demo     set everything up, build the command, run the quick study (minutes) and print the path of its report
# make test     set everything up, build, and run every test
# make build    set everything up and build: the command is build/horner, the package is in .venv
# make test-long   kills, 100 steps on 2 and 4 ranks, a million tokens over 4, 32,768 tokens diagnosed, 20,000 generated, pip compiling its wheel,
#                  wheels for the oldest and the newest torch, a hundred workers, Slurm: what takes minutes
# make test-cuda   on a machine with an NVIDIA GPU: build against VENV's torch, check, sanitize and time the CUDA kernels
# make pretrained   Gemma 3 270M, trained weights from a 4-bit file (1.1 GB in pretrained/): some tests want it, none needs it
# make wheel    dist/horner-*.whl for the torch of VENV
# make wheels   the same for every version in TORCH, each built and tested in an environment of its own (build-wheels)
# make docs     the tables, sentences and pictures of docs/ from docs/numbers
# make format   clang-format all sources
# make clean    remove what was built (clean-all: the virtual environment too)
#
# To build against a torch that you have already:  make build VENV=/path/to/its/virtual/environment

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
SOURCES = $(shell git ls-files 'src/*.h' 'src/*.cpp' 'src/*.cu' 'src/*.cuh' 'tests/*.cpp' 'examples/*.cpp')

.PHONY: build demo test test-asan test-long test-cuda wheel wheels docs pretrained format format-check clean clean-all

build: build/build.ninja
	@ninja -C build
	@$(VENV)/bin/python scripts/link-package.py build/python

# Made once: ninja itself sees to every later change of the CMake files.
build/build.ninja: | $(VENV)/horner-ready
	cmake --preset cpu -DPython_EXECUTABLE=$(abspath $(VENV))/bin/python

build-asan/build.ninja: | $(VENV)/horner-ready
	cmake --preset asan -DPython_EXECUTABLE=$(abspath $(VENV))/bin/python

$(VENV)/horner-ready: requirements.txt scripts/install-packages
	@PYTHON=$(PYTHON) scripts/install-packages
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python scripts/install-requirements.py requirements.txt
	@touch $@

demo: build/build.ninja
	@ninja -C build horner
	build/horner list
	build/horner show l2
	build/horner study quick --out build/demo

test: build format-check test-asan
	@PYTHON=$(PYTHON) scripts/install-packages test || echo "without a browser: the tests of reports are skipped" >&2
	ctest --test-dir build --output-on-failure -j 2

# The tests of the library under the address and undefined-behaviour sanitizers, on the smaller sizes.
test-asan: build-asan/build.ninja
	@ninja -C build-asan
	ctest --test-dir build-asan --output-on-failure -j 2

test-long: build
	HORNER=$(abspath build/horner) HORNER_LONG=1 $(VENV)/bin/python -m pytest -q -p no:cacheprovider tests/scale_test.py
	HORNER=$(abspath build/horner) HORNER_LONG=1 $(VENV)/bin/python -m pytest -q -p no:cacheprovider tests/train_test.py tests/diagnose_test.py -k "hundred or gigabytes"
	HORNER=$(abspath build/horner) HORNER_LONG=1 $(VENV)/bin/python -m pytest -q -p no:cacheprovider tests/pip_test.py
	$(VENV)/bin/python scripts/wheels.py $(firstword $(TORCH)) $(lastword $(TORCH)) --out dist --without-cuda
	@PYTHON=$(PYTHON) scripts/install-packages slurm || echo "without Slurm: the test of an array job will fail" >&2
	HORNER=$(abspath build/horner) HORNER_LONG=1 $(VENV)/bin/python -m pytest -q -s -rs -p no:cacheprovider tests/cluster_test.py -k "hundred or array"
	PYTHONPATH=build/python HORNER=$(abspath build/horner) HORNER_LONG=1 $(VENV)/bin/python -m pytest -q -p no:cacheprovider tests/fuzz_test.py tests/python_test.py tests/transforms_test.py tests/hf_rows_test.py tests/nn_test.py
	PYTHONPATH=build/python HORNER_LONG=1 $(VENV)/bin/python -m pytest -q -s -p no:cacheprovider tests/hf_test.py -k "twenty or whole"
	PYTHONPATH=build/python HORNER=$(abspath build/horner) HORNER_LONG=1 $(VENV)/bin/python -m pytest -q -p no:cacheprovider tests/hf_families_test.py -k table

test-cuda:
	@PYTHON=$(VENV)/bin/python scripts/test-cuda

wheel: build
	@$(VENV)/bin/python scripts/wheel.py --built build --out dist

wheels: build
	@$(VENV)/bin/python scripts/wheels.py $(TORCH) --out dist $(WHEELS)

docs: build/build.ninja
	@ninja -C build horner
	@PYTHON=$(PYTHON) scripts/install-packages test
	@$(VENV)/bin/python scripts/docs.py build/horner
	@$(VENV)/bin/python scripts/variants.py build/horner --write

pretrained: $(VENV)/horner-ready
	@$(VENV)/bin/python scripts/pretrained.py pretrained/gemma-3-270m

format: $(VENV)/horner-ready
	@$(VENV)/bin/clang-format -i $(SOURCES)

format-check: $(VENV)/horner-ready
	@$(VENV)/bin/clang-format --dry-run --Werror $(SOURCES)

clean:
	rm -rf build build-asan build-cuda build-wheels

clean-all: clean
	rm -rf .venv
