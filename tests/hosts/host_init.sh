#!/bin/bash
# PID 1 of one test host, in fresh mount, process, IPC and host name namespaces (and a network of its own, except for
# the laptop). Arguments: NAME ADDRESS GATEWAY DISK HIDDEN KEPT; the last two are lists with a colon between.
#
# DISK is the host's own folder: root (HOME), tmp, hosts and, where it has an SSH server, ssh. What is HIDDEN is empty
# here; what is KEPT (the virtual environment and the Python below it) lies where it always does, read-only.
set -eu
name=$1 address=$2 gateway=$3 disk=$4
IFS=: read -ra hidden <<< "$5"
IFS=: read -ra kept <<< "$6"

mount --make-rprivate /
hostname "$name"
# Bound to /run first: the mounts below cover the places where the originals lie.
mount -t tmpfs tmpfs /run
mkdir -p /run/disk /run/sshd
mount --bind "$disk" /run/disk
for index in "${!kept[@]}"; do
    mkdir -p "/run/kept/$index"
    mount --bind "${kept[$index]}" "/run/kept/$index"
done
for folder in "${hidden[@]}"; do
    mount -t tmpfs tmpfs "$folder"
done
mount --bind /run/disk/root /root
mount --bind /run/disk/tmp /tmp
mount -t tmpfs -o size=256m tmpfs /dev/shm
for index in "${!kept[@]}"; do
    mkdir -p "${kept[$index]}"
    mount --bind "/run/kept/$index" "${kept[$index]}"
    mount -o remount,bind,ro "${kept[$index]}"
    umount "/run/kept/$index"
done
# Names come from the file alone: a name server that cannot be reached would be waited for.
mount --bind /run/disk/hosts /etc/hosts
mount --bind /dev/null /etc/resolv.conf

if [ "$address" != - ]; then
    ip link set lo up
    until ip link show eth0 > /dev/null 2>&1; do sleep 0.02; done
    ip address add "$address/24" dev eth0
    ip link set eth0 up
    # Nothing is forwarded. Ray asks by which address it would leave for elsewhere, and takes that for its own.
    ip route add default via "$gateway"
    /usr/sbin/sshd -D -e -f /run/disk/ssh/sshd_config &
fi
touch /run/disk/ready
# A shell as PID 1 reaps whoever is left without a parent.
while :; do
    sleep 3600 &
    wait $! || true
done
