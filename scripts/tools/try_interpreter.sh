#!/usr/bin/env bash
# Runs the tests of the kernels in Triton's interpreter, on this machine; it needs no GPU. Takes
# minutes, and 1 GB of disk the first time. Arguments go on to pytest. Without any, two processes
# share the tests, and a kernel that none of them ran is a failure.
# Triton goes into a venv of its own, in ${XDG_CACHE_HOME:-~/.cache}/minisgl, which sees the packages
# of the checkout's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/scripts/tools/extra_venv.sh"
ensure_triton_venv

cd "$root"
unset PYTHONDONTWRITEBYTECODE # each process would compile every module anew
[ $# -gt 0 ] || set -- -n 2 --dist worksteal -p support.kernels_reached --record .ran/interpreter
export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 PYTHONPATH=tests
exec "$extra_python" -m pytest tests/kernels "$@"
