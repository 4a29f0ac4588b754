#!/usr/bin/env bash
# Build the environment: find a Python 3.12 that runs, get uv, make the virtual environment, install the lock, install
# this package in editable mode.
#
#   scripts/setup_env.sh [cpu|gpu]      which lock in requirements/ to install (default: cpu)
#   scripts/setup_env.sh --find-python  only print the Python that would be used, or nothing when uv would fetch one
#
# Environment variables: VENV (default .venv), PYTHON (try this interpreter first), UV (use this uv).
# Nothing outside the repository is changed: uv, when missing, is installed from PyPI into .tools/.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
UV_VERSION_SPEC='uv>=0.9,<1'

say() { printf '%s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# A pyenv shim is on PATH, is executable, and may still refuse to run: only running a candidate proves that it works.
# ssl, ctypes and sqlite3 are what a home-built Python most often lacks.
is_python312() {
    [ -x "$1" ] && "$1" -c 'import ctypes, sqlite3, ssl, sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

# The C++ code that vLLM and DeepSpeed compile on first use needs Python.h.
has_headers() {
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

candidates() {
    [ -z "${PYTHON:-}" ] || printf '%s\n' "$PYTHON"
    type -aP python3.12 || true
    type -aP python3 || true
    local root
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        [ -z "$root" ] || printf '%s\n' "$root"/versions/3.12*/bin/python3.12
    done
    printf '%s\n' /usr/bin/python3.12 /usr/local/bin/python3.12 /opt/python/*312*/bin/python3.12 /opt/homebrew/bin/python3.12
}

# Prints the first candidate that works, one with headers before one without.
find_python() {
    local candidate bare=''
    while IFS= read -r candidate; do
        is_python312 "$candidate" || continue
        if has_headers "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
        bare=${bare:-$candidate}
    done < <(candidates)
    [ -z "$bare" ] || printf '%s\n' "$bare"
}

works() { "$1" --version >/dev/null 2>&1; }

# Prints a uv that runs: $UV, one on PATH, or one installed from PyPI into .tools/ with any Python 3 that is there.
find_uv() {
    local candidate python
    while IFS= read -r candidate; do
        if [ -n "$candidate" ] && works "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done < <(printf '%s\n' "${UV:-}"; type -aP uv || true; printf '%s\n' .tools/uv/bin/uv)
    say "uv not found: installing it from PyPI into .tools/"
    while IFS= read -r python; do
        [ -x "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1 || continue
        rm -rf .tools/uv
        if "$python" -m venv .tools/uv >/dev/null 2>&1; then
            .tools/uv/bin/python -m pip install --quiet "$UV_VERSION_SPEC" >&2 || die "pip could not install uv from PyPI (message above)"
        elif "$python" -m pip --version >/dev/null 2>&1; then
            # Debian's python3 without python3-venv cannot make environments, but its pip can fill a folder.
            rm -rf .tools/uv
            "$python" -m pip install --quiet --target .tools/uv "$UV_VERSION_SPEC" >&2 || die "pip could not install uv from PyPI (message above)"
        else
            continue
        fi
        works .tools/uv/bin/uv || die "uv was installed into .tools/uv but does not run; remove that folder and try again"
        printf '%s\n' .tools/uv/bin/uv
        return
    done < <(candidates; type -aP python || true; printf '%s\n' /usr/bin/python3)
    die "no uv, and no Python 3 with venv or pip to install it with. Install one of them and run again:
  apt-get install python3-venv     (Debian, Ubuntu)
  or uv itself: https://docs.astral.sh/uv/getting-started/installation/"
}

if [ "${1:-}" = --find-python ]; then
    find_python
    exit
fi

LOCK=${1:-cpu}
[ -f "requirements/$LOCK.txt" ] || die "no lock requirements/$LOCK.txt: say cpu or gpu"
[ "$(uname -s)" = Linux ] || die "this project runs on Linux (found $(uname -s)): vLLM and the sandboxes need it"

uv=$(find_uv)
if ! is_python312 "$VENV/bin/python"; then
    python=$(find_python)
    if [ -z "$python" ]; then
        say "no working Python 3.12 on this machine: letting uv fetch one"
        "$uv" python install 3.12 >&2 || die "no Python 3.12 was found (looked on PATH, in pyenv's versions and in /usr) and uv could not fetch one (message above).
Install Python 3.12, or point at one: PYTHON=/path/to/python3.12 make env"
        python=$("$uv" python find --managed-python 3.12) || die "uv installed Python 3.12 but does not find it again"
    fi
    has_headers "$python" || say "warning: $python has no Python.h; if something fails to compile later, install python3.12-dev"
    say "Python: $python"
    "$uv" venv --quiet --clear --python "$python" "$VENV"
fi

say "installing requirements/$LOCK.txt into $VENV"
# Compiled once here. Otherwise each of a run's processes compiles torch, vLLM and SkyRL at its first start, or at every one
# where PYTHONDONTWRITEBYTECODE is set: 25 s of CPU each.
"$uv" pip sync --quiet --compile-bytecode --require-hashes --python "$VENV/bin/python" "requirements/$LOCK.txt"
"$uv" pip install --quiet --no-deps --python "$VENV/bin/python" --editable .
say "ready: $VENV/bin/skyrl --help"
