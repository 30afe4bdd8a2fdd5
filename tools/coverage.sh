#!/usr/bin/env bash
# Line coverage of the unit tests, per file.
set -euo pipefail
cd "$(dirname "$0")/.."
make --no-print-directory build PRESET=coverage
ctest --test-dir build/coverage -L unit -j "$((8 * $(nproc)))" >/dev/null || true
gcovr -r . --object-directory build/coverage -f 'src/' --print-summary
