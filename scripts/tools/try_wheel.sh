#!/usr/bin/env bash
# Builds the wheel and the source distribution, installs each into a bare venv outside of the checkout,
# and runs minisgl's commands there on the demo model:
#   scripts/tools/try_wheel.sh [oldest|newest|VERSION]     of PyTorch; without, that of scripts/test.sh
# Needs a package index. Takes minutes, and below $TMPDIR 3 GB of disk, or 12 GB where PyPI's CUDA build
# of PyTorch is the one to be had.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/scripts/venv.sh"
torch=$tested_torch
[ $# = 0 ] || torch=$(torch_release "$1")
unset PYTHONPATH
work=$(mktemp -d)
server=
finish() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT

question="What is the capital of France?"

make_bare_venv() { # NAME, whose interpreter is then $python
  python3 -m venv "$work/$1"
  python=$work/$1/bin/python
}

# From a copy without what git does not know: builds leave files beside the sources.
build() {
  mkdir "$work/source" "$work/dist"
  git -C "$root" ls-files -z | tar -C "$root" --null --files-from - --create | tar -C "$work/source" --extract
  make_bare_venv build
  pip_install 'setuptools>=77'
  cd "$work/source"
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" .
  "$python" -c "from setuptools import build_meta; build_meta.build_sdist('$work/dist')" >/dev/null
}

try() { # NAME FILE
  say "Trying $(basename "$2")."
  make_bare_venv "$1"
  install_torch "$torch"
  pip_install "$2"
  mkdir "$work/run-$1"
  cd "$work/run-$1"
  PATH=$work/$1/bin:$PATH
  minisgl version | expect "^minisgl $(version)\$"
  minisgl chat --temperature 0 "$question" | expect Paris
  echo '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body":
    {"messages": [{"role": "user", "content": "'"$question"'"}], "temperature": 0}}' | tr -d '\n' >in.jsonl
  minisgl batch in.jsonl out.jsonl
  expect Paris <out.jsonl
  minisgl bench --num-requests 4 --max-output-length 32 --repeat 1 | expect 'output tok/s'
  minisgl verify | expect '^RIGHT'
  try_serve
}

try_serve() {
  local url
  : >log
  minisgl serve --port 0 2>log &
  server=$!
  until url=$(grep -o ' at http://[^ ]*' log); do
    kill -0 "$server" || { cat log >&2; exit 1; }
    sleep 0.2
  done
  url=${url# at }
  minisgl chat --url "$url" --temperature 0 "$question" | expect Paris
  curl --silent --show-error --fail "$url/" "$url/docs" | grep -c '</html>' | grep -qx 2
  kill "$server" # on SIGTERM it ends in order
  wait "$server" || { cat log >&2; exit 1; }
  server=
}

expect() { # PATTERN, in what is also shown
  tee >(cat >&2) | grep "$1" >/dev/null || die "Expected: $1"
}

version() { sed -n 's/^__version__ = "\(.*\)"/\1/p' "$work/source/minisgl/__init__.py"; }

build
path=$PATH
for file in "$work"/dist/*; do
  PATH=$path
  try "$([ "${file##*.}" = whl ] && echo wheel || echo sdist)" "$file"
done
say "Both work, with torch $("$python" -c 'import torch; print(torch.__version__)')."
