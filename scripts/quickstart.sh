#!/usr/bin/env bash
# Sets minisgl up in .venv, starts the server, asks it a question and prints the answer as it comes.
#
#   scripts/quickstart.sh [OPTIONS OF minisgl serve, but --host and --port]
#   scripts/quickstart.sh --chat [OPTIONS OF minisgl chat]     talk to the model in the terminal
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/venv.sh"

chat=
options=()
for argument; do
  case $argument in
    --chat) chat=yes ;;
    -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    *) options+=("$argument") ;;
  esac
done

ensure_venv
if [ "$chat" ]; then
  exec "$python" -m minisgl chat "${options[@]}"
else
  "$python" "$root/scripts/ask.py" "${options[@]}"
  echo "Next, to talk to it: . ${venv@Q}/bin/activate && minisgl chat ${options[*]@Q}"
fi
