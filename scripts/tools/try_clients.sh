#!/usr/bin/env bash
# Tries client packages against a running minisgl server, one line a check:
#   scripts/tools/try_clients.sh http://127.0.0.1:1919 [MODEL]
# Exits with 1 if a check fails, 2 if the server cannot be tried. The packages go into a venv of their own, in
# ${XDG_CACHE_HOME:-~/.cache}/minisgl/try_clients. The template of the model must take tools, as
# that of the bundled demo does.
set -euo pipefail

[ $# -ge 1 ] || { echo "usage: $0 URL [MODEL]" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${XDG_CACHE_HOME:-$HOME/.cache}/minisgl/try_clients

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  openai-agents langchain-openai langchain-anthropic 'pydantic-ai-slim[openai]' instructor \
  litellm mcp
export LITELLM_LOCAL_MODEL_COST_MAP=True  # it would fetch a list of prices
exec "$venv/bin/python" "$here/try_clients.py" "$@"
