# Sourced by try_*.sh, with $root set to the repository: `ensure_venv_with NAME REQUIREMENT` makes a
# venv of its own for a package that the tests do without, in ${XDG_CACHE_HOME:-~/.cache}/minisgl/NAME.
# It sees the packages of the checkout's venv, and pip does not replace torch. `ensure_triton_venv`
# makes one for Triton. $extra_python is its interpreter.

source "$root/scripts/venv.sh"

ensure_venv_with() { # NAME REQUIREMENT
  local folder=${XDG_CACHE_HOME:-$HOME/.cache}/minisgl/$1
  ensure_venv "[test]"
  extra_python=$folder/bin/python
  [ -x "$extra_python" ] || "$python" -m venv "$folder"
  echo "import site; site.addsitedir('$(packages_of "$python")')" \
    >"$(packages_of "$extra_python")/checkout.pth"
  "$extra_python" -m pip install --quiet --disable-pip-version-check \
    --constraint <(echo "torch==$(torch_version)") "$2" || die "Installing $2 failed; see above."
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
    *) return 1 ;;
  esac
}

torch_version() { "$python" -c 'from importlib.metadata import version; print(version("torch"))'; }

packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
