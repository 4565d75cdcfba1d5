#!/usr/bin/env bash
# The network namespace of a cluster's bridge, and the machine's own interface in that network.
set -euo pipefail
mark=$1 link=$2 address=$3 machine=$4 # machine: a process in the machine's network namespace

ip link add bridge type bridge
ip link set bridge up
ip link add machine type veth peer name "$link" netns "$machine"
ip link set machine master bridge up
nsenter --net="/proc/$machine/ns/net" ip address add "$address" dev "$link"
nsenter --net="/proc/$machine/ns/net" ip link set "$link" up

exec unshare --pid --fork --kill-child --mount-proc bash -c 'sleep infinity & wait' "$mark"
