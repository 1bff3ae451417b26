#!/usr/bin/env bash
# Run the tests, on a bare machine too: sets up .venv on the first call. Arguments go to pytest:
#
#     scripts/test.sh                      all tests
#     scripts/test.sh tests/config/test_config.py -k batch
#
# Exit status and last line are pytest's own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_environment.sh

ensure_environment requirements-dev.txt
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the tests start several ranks at once
exec "$python" -m pytest "$@"
