#!/usr/bin/env bash
# One host: the namespaces in which this starts get a network, a name and private directories, then slurmd runs in them.
set -euo pipefail
mark=$1 address=$2 switch=$3 # switch: a process in the network namespace of the bridge
directory=${mark%#*} name=${mark##*#}

ip link set lo up
ip link add eth0 type veth peer name "$name" netns "$switch"
ip address add "$address/24" dev eth0
ip link set eth0 up
nsenter --net="/proc/$switch/ns/net" ip link set "$name" master bridge up

hostname "$name"
mount --bind "$directory/etc" /etc/slurm # a job step drops SLURM_CONF
mount --bind "$directory/hosts" /etc/hosts
mount --bind "$directory/$name/ray" /tmp/ray
mount --bind "$directory/$name/enroot" /tmp/enroot
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /sys/fs/cgroup # slurmd wants something mounted here even when it tracks processes without cgroups

# shellcheck disable=SC2016
cd "$directory/$name" && exec unshare --pid --fork --kill-child --mount-proc bash -c '"$@" & wait $!' "$mark" slurmd -D
