#!/usr/bin/env bash
# Runs the tests of the server on Ray (tests/ray_cluster) on a local cluster without GPUs. Takes a
# few minutes, two cores and 4 GB of memory. Arguments go on to pytest.
# Ray goes into a venv of its own, in ${XDG_CACHE_HOME:-~/.cache}/minisgl/try_ray, which sees the
# packages of the checkout's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/scripts/venv.sh"
ensure_venv "[test]"

packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

ray_venv=${XDG_CACHE_HOME:-$HOME/.cache}/minisgl/try_ray
[ -x "$ray_venv/bin/python" ] || "$python" -m venv "$ray_venv"
echo "import site; site.addsitedir('$(packages "$python")')" \
  >"$(packages "$ray_venv/bin/python")/checkout.pth"
"$ray_venv/bin/python" -m pip install --quiet --disable-pip-version-check 'ray[serve]>=2.60'

cd "$root"
OMP_NUM_THREADS=1 exec "$ray_venv/bin/python" -m pytest -m ray tests/ray_cluster "$@"
