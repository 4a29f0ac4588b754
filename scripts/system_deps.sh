#!/usr/bin/env bash
# What the quickstart needs of the system and pip cannot give: a sandbox (Docker or bubblewrap) and a C++ compiler.
# Installs what is missing where it may (root on Debian or Ubuntu), else says what to install.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }

docker_answers() { command -v docker >/dev/null 2>&1 && timeout 10 docker info >/dev/null 2>&1; }
bubblewrap_works() { command -v bwrap >/dev/null 2>&1; }

wanted=()
docker_answers || bubblewrap_works || wanted+=(bubblewrap)
command -v g++ >/dev/null 2>&1 || wanted+=(g++)
[ ${#wanted[@]} -gt 0 ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    say "installing ${wanted[*]} with apt-get"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq >&2
    apt-get install -qq -y --no-install-recommends "${wanted[@]}" >&2
    exit 0
fi
say "error: missing ${wanted[*]}: agents' commands run in Docker or bubblewrap, and vLLM's CPU build compiles with g++.
Start Docker, or install what is missing, for example: sudo apt-get install ${wanted[*]}"
exit 1
