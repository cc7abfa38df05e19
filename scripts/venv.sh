# Sourced by test.sh and quickstart.sh, with $root set to the repository: `ensure_venv [EXTRAS]`
# makes $root/.venv where it is missing and installs minisgl into it, editable, when pyproject.toml
# has changed since the last time. After that it needs no network. $python is the interpreter.

venv=$root/.venv
python=$venv/bin/python
cpu_index=https://download.pytorch.org/whl/cpu
# What the tests run with where no PyTorch is installed; try_torch.sh runs them with others.
tested_torch='torch==2.13.*'

say() { echo "$*" >&2; }
die() { say "$*"; exit 1; }

ensure_venv() { # [EXTRAS], such as "[test]"
  [ -x "$python" ] || make_venv
  up_to_date "${1:-}" || install "${1:-}"
}

# Prefers an interpreter beside which a torch in range is installed: the venv then sees those
# packages as well (an active venv's too, which --system-site-packages would not give).
make_venv() {
  local candidate base='' folders=''
  for candidate in python python3 python3.13 python3.12 python3.11; do
    command -v "$candidate" >/dev/null || continue
    folders=$("$candidate" "$root/scripts/probe_python.py" 2>/dev/null) || continue
    [ -n "$folders" ] && { base=$candidate; break; }
    base=${base:-$candidate}
  done
  [ -n "$base" ] || die "minisgl needs Python 3.11 to 3.13 on the PATH ($(found_python))."

  say "Making $venv with $("$base" -V)."
  "$base" -m venv "$venv" || { rm -rf "$venv"; die "$base -m venv failed; see above."; }
  if [ -n "$folders" ]; then
    say "Reusing the installed torch."
    echo "$folders" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/reused.pth"
  fi
}

found_python() {
  local version
  version=$(python3 -V 2>/dev/null) && echo "python3 is $version" || echo "there is no python3"
}

install() { # EXTRAS
  say "Installing minisgl$1 into $venv. The first time this takes minutes."
  has_torch ||
    say "PyTorch alone is a download of 0.2 GB for a CPU, and of some 3 GB for an NVIDIA GPU."
  # Building without isolation needs setuptools here, and no network once the packages are there.
  pip_install 'setuptools>=77' || die "Installing setuptools failed; see above."
  local torch
  torch=$(torch_requirement)
  [ "$1" != "[test]" ] || torch=$tested_torch
  install_torch "$torch"
  pip_install --no-build-isolation -e "$root$1" || die "Installing minisgl failed; see above."
  [ -e "$venv/bin/hf" ] || make_hf
  fingerprint "$1" >"$venv/installed"
}

install_torch() { # REQUIREMENT
  if ! has_torch && ! has_nvidia_driver && cpu_index_answers; then
    pip_install --index-url "$cpu_index" "$1" ||
      say "PyTorch's CPU build could not be installed; going on with the usual one."
  fi
  has_torch || pip_install "$1" || die "Installing PyTorch failed; see above."
}

# The command of the Hub's client, which a venv lacks where it reuses that package.
make_hf() {
  printf '#!/bin/sh\nexec "$(dirname "$0")/python" -m huggingface_hub.cli.hf "$@"\n' >"$venv/bin/hf"
  chmod +x "$venv/bin/hf"
}

# Shows each download with its size, and nothing else that goes well; without the build's warnings,
# which are for packagers.
pip_install() {
  PYTHONWARNINGS=ignore PYTHONUNBUFFERED=1 "$python" -m pip install \
    --progress-bar off --disable-pip-version-check "$@" |
    sed -u -n -E 's/^ *(Downloading .*)/  \1/p; s/^Installing collected.*/  Installing what was downloaded/p' >&2
}

# What was installed last. The path is part of it: an editable install points at its checkout.
fingerprint() { # EXTRAS
  echo "$root$1"
  cat "$root/pyproject.toml"
}

# The packages for the tests include those for running.
up_to_date() { # EXTRAS
  local extras
  for extras in "$1" "[test]"; do
    fingerprint "$extras" | cmp -s - "$venv/installed" && return
  done
  return 1
}

has_torch() { [ -n "$("$python" "$root/scripts/probe_python.py")" ]; }

has_nvidia_driver() { command -v nvidia-smi >/dev/null || [ -e /proc/driver/nvidia/version ]; }

torch_requirement() { grep -o 'torch>=[^"]*' "$root/pyproject.toml"; }

# `oldest` and `newest` are those of the range in pyproject.toml.
torch_release() { # oldest|newest|VERSION
  local range lowest
  range=$(torch_requirement)
  lowest=${range#torch>=}
  case $1 in
    oldest) echo "torch==${lowest%%,*}" ;;
    newest) echo "$range" ;;
    *) echo "torch==$1" ;;
  esac
}

# The alarm ends a name lookup that hangs; urlopen's own timeout does not cover it.
cpu_index_answers() {
  "$python" - "$cpu_index/torch/" 2>/dev/null <<'PYTHON'
import signal, sys, urllib.request
signal.alarm(4)
urllib.request.urlopen(sys.argv[1], timeout=3).close()
PYTHON
}
