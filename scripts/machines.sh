#!/usr/bin/env bash
# Several machines out of this one, to try a run over a Ray cluster. Each has a network, a host name, a process table, and /tmp,
# /var/tmp and /dev/shm of its own; all else of the disk is the same for all, and read-only below the folders that are named.
#
#   scripts/machines.sh up COUNT [FOLDER …]   node-0 … at 10.78.0.10 …, behind one switch; node-0 alone may write to FOLDERs
#   scripts/machines.sh on N COMMAND …        a command on node-N, in this folder
#   scripts/machines.sh cable N up|down       plug node-N's cable in, or pull it
#   scripts/machines.sh signal N NAME         a signal to every process of node-N but its first: KILL, STOP, CONT
#   scripts/machines.sh down                  all of them off
#
# For root, with iproute2 and util-linux. The project must not be below /tmp.
set -euo pipefail
here=/run/thundersync-machines
switch=thundersync0

first_process() { cat "$here/$1.pid"; }

boot() {
    hostname "node-$1"
    mount --make-rprivate /
    local private
    for private in /tmp /var/tmp /dev/shm; do mount -t tmpfs none "$private"; done
    local index=$1 folder
    shift
    for folder in "$@"; do
        [ "$index" = 0 ] || { mount --bind "$folder" "$folder" && mount -o remount,bind,ro "$folder"; }
    done
    touch "$here/$index.up"
    exec sleep infinity
}

case ${1:-} in
up)
    count=$2
    shift 2
    mkdir -p "$here"
    ip link add "$switch" type bridge
    ip link set "$switch" up
    for index in $(seq 0 $((count - 1))); do
        ip netns add "ts-node-$index"
        ip link add "ts-cable-$index" type veth peer name eth0 netns "ts-node-$index"
        ip link set "ts-cable-$index" master "$switch" up
        ip -n "ts-node-$index" link set lo up
        ip -n "ts-node-$index" addr add "10.78.0.$((10 + index))/24" dev eth0
        ip -n "ts-node-$index" link set eth0 up
        setsid ip netns exec "ts-node-$index" unshare --mount --uts --ipc --pid --fork --kill-child --mount-proc \
            "$(realpath "$0")" boot "$index" "$@" </dev/null >"$here/$index.log" 2>&1 &
        parent=$!
        until [ -e "$here/$index.up" ]; do
            kill -0 "$parent" || { cat "$here/$index.log"; exit 1; }
            sleep 0.05
        done
        cat "/proc/$parent/task/$parent/children" | tr -d ' ' >"$here/$index.pid"
    done
    ;;
boot) shift && boot "$@" ;;
on)
    index=$2
    shift 2
    exec nsenter --target "$(first_process "$index")" --mount --uts --ipc --pid --net --wd="$PWD" "$@"
    ;;
cable) ip link set "ts-cable-$2" "$3" ;;
signal)
    space=$(readlink "/proc/$(first_process "$2")/ns/pid")
    for process in /proc/[0-9]*; do
        id=${process#/proc/}
        if [ "$(readlink "$process/ns/pid" 2>/dev/null)" = "$space" ] && [ "$id" != "$(first_process "$2")" ]; then
            kill -s "$3" "$id" 2>/dev/null || true
        fi
    done
    ;;
down)
    for file in "$here"/*.pid; do
        [ -e "$file" ] || continue
        index=$(basename "$file" .pid)
        kill -KILL "$(cat "$file")" 2>/dev/null || true
        ip netns del "ts-node-$index" 2>/dev/null || true
        ip link del "ts-cable-$index" 2>/dev/null || true
    done
    ip link del "$switch" 2>/dev/null || true
    rm -rf "$here"
    ;;
*)
    sed -n '2,11p' "$0"
    exit 2
    ;;
esac
