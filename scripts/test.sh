#!/usr/bin/env bash
# Run the tests, on a bare machine too: sets up .venv at first. Arguments go to pytest:
#
#     scripts/test.sh                      all tests
#     scripts/test.sh tests/config/test_config.py -k batch
#
# Exit status and last line are pytest's own. Without arguments two pytests share the tests, as most tests use one core:
# one goes from the first file, the other from the last, until they meet (tests/support/selection.py). The output of the
# second follows that of the first, then come the last lines of both. The status is 0 if both passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_environment.sh

ensure_environment requirements-dev.txt
if (($#)); then
    exec "$python" -m pytest "$@"
fi

output=$(mktemp -d)
touch "$output/first" "$output/second" # tail may start before the tests
trap 'rm -rf "$output"' EXIT
set -m # a process group for each: else bash would have them, and all that they start, ignore Ctrl-C
"$python" -m pytest --share="$output" </dev/null >"$output/first" 2>&1 &
one=$!
"$python" -m pytest -o cache_dir=.pytest_cache/second --share="$output" </dev/null >"$output/second" 2>&1 &
two=$!
trap 'kill -INT -- "-$one" "-$two" 2>/dev/null || true' INT TERM
tail -n +1 -f --pid="$one" "$output/first" &
wait "$!" || true
status=0
wait "$one" || status=$?
wait "$two" || status=$?
cat "$output/second"
tail -q -n 1 "$output/first" "$output/second"
exit "$status"
