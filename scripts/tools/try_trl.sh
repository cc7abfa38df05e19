#!/usr/bin/env bash
# Runs the tests of a server that answers for a trainer of TRL and takes its weights, with TRL itself,
# on this machine; they need no GPU. Takes a few minutes. Arguments go on to pytest.
# TRL goes into a venv of its own, in ${XDG_CACHE_HOME:-~/.cache}/minisgl/try_trl, which sees the
# packages of the checkout's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/scripts/tools/extra_venv.sh"
# The asynchronous trainer is experimental, and may change with any release. It imports aiohttp.
ensure_venv_with try_trl 'trl==1.16.*' aiohttp

cd "$root"
[ $# -gt 0 ] || set -- --record .ran/trl
OMP_NUM_THREADS=1 exec "$extra_python" -m pytest -m trl tests/scripts "$@"
