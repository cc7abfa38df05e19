#!/usr/bin/env bash
# Runs the tests of KV pages that NIXL reads, with NIXL itself, on this machine; it needs no GPU.
# Takes a minute, and 1 GB of disk the first time. Arguments go on to pytest.
# NIXL goes into a venv of its own, in ${XDG_CACHE_HOME:-~/.cache}/minisgl/try_nixl, which sees the
# packages of the checkout's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/scripts/tools/extra_venv.sh"
ensure_venv_with try_nixl "$(grep -o '"nixl>=[^"]*' "$root/pyproject.toml" | tr -d '"')"

cd "$root"
[ $# -gt 0 ] || set -- --record .ran/nixl
OMP_NUM_THREADS=1 exec "$extra_python" -m pytest -m nixl tests/tiers tests/router "$@"
