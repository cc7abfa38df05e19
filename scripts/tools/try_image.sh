#!/usr/bin/env bash
# Builds the image of scripts/Dockerfile with PyTorch's CPU build, and asks the demo model a question
# through a container of it. Needs Docker and a network; takes minutes and 2 GB of disk.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
image=minisgl-try
container=

finish() { [ -z "$container" ] || docker rm --force "$container" >/dev/null; }
trap finish EXIT

docker build --file "$root/scripts/Dockerfile" --tag "$image" \
  --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu "$root"
docker run --rm "$image" version

container=$(docker run --detach --init --publish 127.0.0.1::1919 "$image")
url=http://$(docker port "$container" 1919/tcp)
until curl --silent --fail "$url/health"; do
  [ "$(docker inspect --format '{{.State.Running}}' "$container")" = true ] ||
    { docker logs "$container"; exit 1; }
  sleep 1
done
curl --silent --show-error --fail "$url/v1/chat/completions" -H 'Content-Type: application/json' \
  -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}' |
  tee /dev/stderr | grep -q Paris

docker stop "$container" >/dev/null # by SIGTERM, on which the server ends in order
[ "$(docker inspect --format '{{.State.ExitCode}}' "$container")" = 0 ] ||
  { docker logs "$container"; exit 1; }
