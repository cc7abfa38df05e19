#!/usr/bin/env bash
# Runs the tests of the server on Ray (tests/ray_cluster) on a local cluster without GPUs. Takes a
# few minutes, two cores and 4 GB of memory. Arguments go on to pytest.
# Ray goes into a venv of its own, in ${XDG_CACHE_HOME:-~/.cache}/minisgl/try_ray, which sees the
# packages of the checkout's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/scripts/tools/extra_venv.sh"
ensure_venv_with try_ray 'ray[serve]>=2.60'

cd "$root"
[ $# -gt 0 ] || set -- --record .ran/ray
OMP_NUM_THREADS=1 exec "$extra_python" -m pytest -m ray tests/ray_cluster "$@"
