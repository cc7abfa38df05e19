#!/usr/bin/env bash
# Sets up what is missing and runs every check. Arguments go on to pytest: scripts/test.sh -k radix
# Without any, two processes share the tests, a file at a time. The tests of the pages use a browser
# if there is one; scripts/tools/browser.sh installs it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/venv.sh"
ensure_venv "[test]"

cd "$root"
"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy
# Tests start hundreds of programs, each of which would otherwise compile every module anew.
unset PYTHONDONTWRITEBYTECODE
[ $# -gt 0 ] || set -- -n 2 --dist loadfile -rs --record .ran/plain tests
"$python" -m pytest "$@"
