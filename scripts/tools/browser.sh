#!/usr/bin/env bash
# Installs Debian's chromium, with which the tests try the pages, where no browser is found:
#   scripts/tools/browser.sh
# Prints the browser's path. Exits with 1 if there is none in the end.
set -euo pipefail

find_browser() {
  command -v chromium || command -v chromium-browser ||
    command -v google-chrome || command -v google-chrome-stable
}

if ! find_browser >/dev/null && command -v apt-get >/dev/null; then
  as_root=$([ "$(id -u)" = 0 ] || echo sudo)
  $as_root apt-get update -qq >&2
  # The font is for letters that the page is drawn with; the image of a container may have none.
  DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends \
    chromium fonts-dejavu-core >&2
fi
find_browser || { echo "There is no browser, and chromium could not be installed." >&2; exit 1; }
