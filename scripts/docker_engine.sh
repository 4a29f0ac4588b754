#!/usr/bin/env bash
# A Docker engine for sandbox tests where none answers, and the image that sandboxes default to.
#
#   scripts/docker_engine.sh up      use the engine that answers, else start one (root on Debian or Ubuntu); make the image
#   scripts/docker_engine.sh down    stop the engine that `up` started; one that was there already is left alone
#
# The engine that is started has no bridge and touches no packet filter: containers of this project have no network.
set -euo pipefail
cd "$(dirname "$0")/.."

STATE=.tools/docker-engine
IMAGE=${IMAGE:-local/bookworm-py:1}
SOCKET=/var/run/docker.sock
START_TENTHS=600

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
answers() { command -v docker >/dev/null && timeout 10 docker version >/dev/null 2>&1; }
may_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

install() {
    may_install || die "$* missing, and only root on Debian or Ubuntu may have it installed here. Install it, or start Docker"
    say "installing $* with apt-get"
    DEBIAN_FRONTEND=noninteractive apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >"$STATE/apt.log" 2>&1 ||
        die "apt-get install $* failed; see $STATE/apt.log"
}

is_engine() { [ -n "$1" ] && [ "$(cat "/proc/$1/comm" 2>/dev/null)" = dockerd ]; }

start_engine() {
    command -v dockerd >/dev/null || install docker.io
    # dockerd refuses to start over the pid file of one that was killed.
    local stale=/var/run/docker.pid
    if [ -f $stale ] && ! is_engine "$(cat $stale)"; then rm -f $stale; fi
    say "starting dockerd"
    setsid dockerd --host="unix://$SOCKET" --bridge=none --iptables=false --ip6tables=false --ip-forward=false \
        --ip-masq=false --log-driver=none >"$STATE/dockerd.log" 2>&1 </dev/null &
    local pid=$!
    echo "$pid" >"$STATE/pid"
    for _ in $(seq $START_TENTHS); do
        answers && return
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.1
    done
    tail -n 15 "$STATE/dockerd.log" >&2
    die "dockerd did not come up; its log is $STATE/dockerd.log"
}

make_image() {
    command -v debootstrap >/dev/null || install debootstrap
    local codename
    # shellcheck source=/dev/null
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT  # not local: the trap runs when the function has returned
    say "making the image $IMAGE ($codename with Python)"
    debootstrap --variant=minbase --include=python3-minimal "$codename" "$root" >"$STATE/debootstrap.log" 2>&1 ||
        die "debootstrap failed; see $STATE/debootstrap.log"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,info,locale,man}/*
    find "$root/dev" -mindepth 1 -delete
    echo 'agent:x:1000:1000::/workspace:/bin/bash' >>"$root/etc/passwd"
    echo 'agent:x:1000:' >>"$root/etc/group"
    command install -d -o 1000 -g 1000 "$root/workspace"
    chmod 755 "$root"
    tar --numeric-owner -C "$root" -c . | docker import -c 'ENV LANG=C.UTF-8' -c 'CMD ["/bin/bash"]' - "$IMAGE" >/dev/null
}

up() {
    mkdir -p "$STATE"
    answers || start_engine
    docker image inspect "$IMAGE" >/dev/null 2>&1 || make_image
    say "$(docker info --format 'Docker {{.ServerVersion}}, {{.Driver}}, cgroup v{{.CgroupVersion}}') with $IMAGE"
}

down() {
    local pid
    pid=$(cat "$STATE/pid" 2>/dev/null) || return 0
    rm -f "$STATE/pid"
    is_engine "$pid" || return 0
    docker ps -aq --filter label=skyrl-thundersync.run | xargs -r docker rm -f >/dev/null
    kill -TERM "$pid"
    for _ in $(seq $START_TENTHS); do
        kill -0 "$pid" 2>/dev/null || return 0
        sleep 0.1
    done
    die "dockerd ($pid) does not stop"
}

case ${1:-} in
    up | down) "$1" ;;
    *) die "usage: $0 up|down" ;;
esac
