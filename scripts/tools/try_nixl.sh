#!/usr/bin/env bash
# Runs the tests of KV pages that NIXL reads, with NIXL itself, on this machine; it needs no GPU.
# Takes a minute, and 1 GB of disk the first time. Arguments go on to pytest.
# NIXL goes into a venv of its own, in ${XDG_CACHE_HOME:-~/.cache}/minisgl/try_nixl, which sees the
# packages of the checkout's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/scripts/venv.sh"
ensure_venv "[test]"

packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

nixl_venv=${XDG_CACHE_HOME:-$HOME/.cache}/minisgl/try_nixl
[ -x "$nixl_venv/bin/python" ] || "$python" -m venv "$nixl_venv"
echo "import site; site.addsitedir('$(packages "$python")')" \
  >"$(packages "$nixl_venv/bin/python")/checkout.pth"
requirement=$(grep -o '"nixl>=[^"]*' "$root/pyproject.toml" | tr -d '"')
"$nixl_venv/bin/python" -m pip install --quiet --disable-pip-version-check "$requirement"

cd "$root"
OMP_NUM_THREADS=1 exec "$nixl_venv/bin/python" -m pytest -m nixl tests/runner tests/router "$@"
