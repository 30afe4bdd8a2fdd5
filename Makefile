# A thin front for CMake. `make` alone builds; `./dev` installs what is missing first.
JOBS ?= $(shell nproc)
PRESET ?= release
# Warnings are errors for those who change the code, not for those whose compiler is newer than ours.
WERROR ?= $(if $(filter true 1,$(CI)),ON,OFF)
dir = $(if $(filter release,$(PRESET)),build,build/$(PRESET))

.PHONY: all build run test quick bench check format fuzz fault coverage install uninstall clean test-all test-rest deb matrix wheel wheel-arm
all: build

build:
	@cmake --preset $(PRESET) -DKV_WERROR=$(WERROR) >build-$(PRESET).log 2>&1 || { cat build-$(PRESET).log; rm -f build-$(PRESET).log; exit 1; }
	@sed -n 's/^-- \(libkvx_cuda: .*\)/\1/p' build-$(PRESET).log; rm -f build-$(PRESET).log
	@tools/build.sh $(dir) $(JOBS) $(TARGETS)

# Only what a replay needs: two programs, and the library by which block managers ask the indexer.
run: TARGETS = kv-indexer kvasir kvbm_http
run: build
	@tools/run.sh

test:
	@KV_TEST_BUILDS='release/short asan/short' tools/test.sh

test-all:
	@KV_TEST_BUILDS='release asan tsan' KV_TEST_PACKAGES=1 KV_FUZZ_SECONDS=$${KV_FUZZ_SECONDS:-3} tools/test.sh

# The part of test-all that test leaves out; CI runs it after test.
test-rest:
	@KV_TEST_BUILDS='release/long asan/long tsan' KV_TEST_PACKAGES=1 KV_FUZZ_SECONDS=$${KV_FUZZ_SECONDS:-3} tools/test.sh

quick: build
	@ctest --test-dir $(dir) --output-on-failure -j $$((8 * $(JOBS))) -L unit -LE long # see KV_CORE

bench: build
	@tools/bench.sh

check:
	@tools/check.sh

format:
	@tools/check.sh --fix-format

fuzz:
	@tools/fuzz.sh $(or $(SECONDS_EACH),60)

fault: build
	@tools/fault.sh

matrix:
	@tools/matrix.sh $(COMPILERS)

coverage:
	@tools/coverage.sh

deb:
	@tools/deb.sh

# Only what the wheel holds.
wheel: TARGETS = python-package kv_cli kv_manager kv_volume kv_plan kv_group kv_plugin_redis kv_index kv_llama
wheel: build
	@tools/wheel.py

# Needs a built tree, too: its test compares both wheels.
wheel-arm: wheel
	@tools/cross.sh

install: build
	@cmake --install $(dir) $(if $(PREFIX),--prefix "$(PREFIX)")

uninstall:
	@cmake --build $(dir) --target uninstall

clean:
	rm -rf build
