# Sourced by try_*.sh, with $root set to the repository: `ensure_venv_with NAME REQUIREMENT...` makes
# a venv of its own for packages that the tests do without, in ${XDG_CACHE_HOME:-~/.cache}/minisgl/NAME.
# It sees the packages of the checkout's venv, and pip does not replace torch. `ensure_triton_venv`
# makes one for Triton, and `ensure_torch_venv NAME REQUIREMENT` one for another torch. $extra_python
# is its interpreter.

source "$root/scripts/venv.sh"

ensure_venv_with() { # NAME REQUIREMENT...
  ensure_extra_venv "$1"
  install_extra --constraint <(echo "torch==$(torch_version)") "${@:2}"
}

# Without Triton, which the CPU builds of PyTorch do not bring either.
ensure_torch_venv() { # NAME REQUIREMENT
  local index=()
  ensure_extra_venv "$1"
  if ! has_nvidia_driver && cpu_index_answers; then index=(--index-url "$cpu_index"); fi
  install_extra ${index[@]+"${index[@]}"} --upgrade --no-deps "$2"
  "$extra_python" -c 'from importlib.metadata import requires; print(*requires("torch"), sep="\n")' |
    grep -v '^triton' | install_extra --requirement /dev/stdin
}

# It has no pip of its own, nor setuptools, which may be an older release: those of the checkout do.
ensure_extra_venv() { # NAME
  local folder=${XDG_CACHE_HOME:-$HOME/.cache}/minisgl/$1
  ensure_venv "[test]"
  extra_python=$folder/bin/python
  [ -x "$extra_python" ] || "$python" -m venv --without-pip "$folder"
  echo "import site; site.addsitedir('$(packages_of "$python")')" \
    >"$(packages_of "$extra_python")/checkout.pth"
}

install_extra() { # of pip install
  "$extra_python" -m pip install --quiet --disable-pip-version-check "$@" ||
    die "Installing ${*: -1} failed; see above."
}

# PyTorch's CPU builds come without Triton, and name no release of it.
ensure_triton_venv() {
  ensure_venv "[test]"
  local release
  release=$(triton_of "$(torch_version)") || die "No release of Triton is known for this torch."
  ensure_venv_with "triton-$release" "triton==$release"
}

# The release that the wheel of this torch on PyPI requires, by its metadata.
triton_of() { # TORCH_VERSION
  case $1 in
    2.11.*) echo 3.6.0 ;;
    2.12.0*) echo 3.7.0 ;;
    2.12.* | 2.13.*) echo 3.7.1 ;;
    2.14.*) echo 3.8.0 ;;
    2.15.*) echo 3.9.0 ;;
    *) return 1 ;;
  esac
}

torch_version() { "$python" -c 'from importlib.metadata import version; print(version("torch"))'; }

packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
