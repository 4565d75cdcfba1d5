#!/bin/sh
# Install what the tests on Slurm need, where that can be done without a question; otherwise say so, and those tests skip.
PATH=$PATH:/usr/sbin:/sbin
for program in slurmctld slurmd munged ip unshare gcc; do
    command -v "$program" > /dev/null || missing="$missing $program"
done
for file in /usr/include/stdio.h /usr/include/slurm/spank.h /usr/lib/*/libpmix.so; do
    [ -e "$file" ] || missing="$missing ${file##*/}"
done
[ -n "$missing" ] || exit 0

packages="slurm-wlm munge iproute2 util-linux gcc libc6-dev libslurm-dev libpmix-dev"
skip() {
    echo "No Slurm for the tests: $1; those that need it are skipped (by hand: apt-get install $packages)"
    exit 0
}
command -v apt-get > /dev/null || skip "no apt-get here"
sudo=
if [ "$(id -u)" != 0 ]; then
    sudo="sudo -n"
    $sudo true 2> /dev/null || skip "neither root nor sudo without a password"
fi
apt="$sudo env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=15"
install="$apt install --yes --no-install-recommends $packages"
echo "Installing$missing for the tests on Slurm"
$install > /dev/null 2>&1 || { $apt update > /dev/null 2>&1 && $install > /dev/null 2>&1; } || skip "apt-get failed"
