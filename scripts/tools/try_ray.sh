#!/usr/bin/env bash
# Runs the tests of the server on Ray (tests/ray_cluster) on a local cluster without GPUs. Takes a
# few minutes, two cores and 4 GB of memory. Arguments go on to pytest.
# The packages go into a venv of their own, in ${XDG_CACHE_HOME:-~/.cache}/minisgl/try_ray.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${XDG_CACHE_HOME:-$HOME/.cache}/minisgl/try_ray

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "$root[ray,test]"
cd "$root"
exec "$venv/bin/python" -m pytest -m ray tests/ray_cluster "$@"
