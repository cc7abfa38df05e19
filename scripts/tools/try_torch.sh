#!/usr/bin/env bash
# Runs the tests of scripts/test.sh with another release of PyTorch, on this machine:
#   scripts/tools/try_torch.sh oldest|newest|VERSION [pytest's arguments]
# `oldest` and `newest` are those of the range in pyproject.toml. PyTorch goes into a venv of its own,
# in ${XDG_CACHE_HOME:-~/.cache}/minisgl, which sees the other packages of the checkout's. The first
# time takes 1 GB of disk, or 5 GB where PyPI's CUDA build is the one to be had.
set -euo pipefail

[ $# -ge 1 ] || { echo "usage: $0 oldest|newest|VERSION [pytest's arguments]" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/scripts/tools/extra_venv.sh"
name=torch-$1
requirement=$(torch_release "$1")
shift
ensure_torch_venv "$name" "$requirement"

cd "$root"
[ $# -gt 0 ] || set -- -n 2 --dist loadfile -rs --record ".ran/$name" tests
exec "$extra_python" -m pytest "$@"
