# Sourced by try_*.sh, with $root set to the repository: `ensure_venv_with NAME REQUIREMENT` makes a
# venv of its own for a package that the tests do without, in ${XDG_CACHE_HOME:-~/.cache}/minisgl/NAME.
# It sees the packages of the checkout's venv. $extra_python is its interpreter.

source "$root/scripts/venv.sh"

ensure_venv_with() { # NAME REQUIREMENT
  local folder=${XDG_CACHE_HOME:-$HOME/.cache}/minisgl/$1
  ensure_venv "[test]"
  extra_python=$folder/bin/python
  [ -x "$extra_python" ] || "$python" -m venv "$folder"
  echo "import site; site.addsitedir('$(packages_of "$python")')" \
    >"$(packages_of "$extra_python")/checkout.pth"
  "$extra_python" -m pip install --quiet --disable-pip-version-check "$2"
}

packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
