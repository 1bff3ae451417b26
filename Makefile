.PHONY: environment check test quickstart

# The check that belongs before every commit: format, lint, types, fast tests.
check: environment
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy
	bash scripts/test.sh -m "not slow and not launcher"

test:
	bash scripts/test.sh

quickstart:
	bash scripts/quickstart.sh

environment:
	bash -c 'source scripts/setup_environment.sh && ensure_environment requirements-dev.txt'
