#!/usr/bin/env bash
# Compiles every Triton kernel for the GPUs that it is meant for, on this machine; it needs no GPU.
# Takes minutes, and 1 GB of disk the first time. Arguments go on to compile_kernels.py.
# Triton goes into a venv of its own, in ${XDG_CACHE_HOME:-~/.cache}/minisgl, which sees the
# packages of the checkout's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/scripts/tools/extra_venv.sh"
ensure_triton_venv

cd "$root"
OMP_NUM_THREADS=1 exec "$extra_python" scripts/tools/compile_kernels.py "$@"
