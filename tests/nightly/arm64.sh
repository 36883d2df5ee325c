#!/bin/sh
# The tests in a 64-bit Arm Debian under user-mode QEMU, made as like a phone as that allows: arm64.sh ROOT [PYTEST ARGUMENTS...]
#
#   ROOT              a folder for the Debian; made the first time (350 MB, some minutes), used again afterwards
#   no /dev/shm       its /dev holds the few devices a program needs, and nothing else
#   no io_uring       QEMU does not know the system calls
#   no direct I/O     QEMU 7.2 does not pass on what the file system says of it, so files are read through the page cache
#   memlock 64 KiB    of every process in it
#   unequal cores     a quarter of the processors say that they are little ones; with control groups of version 1, processor
#                     time is limited to three quarters of all
#
# The C tests are not among these: tests/native/run.sh compiles them for Arm on this side, which takes a twentieth of the time.
# Needs root, on Debian: debootstrap, qemu-user-static, binfmt-support. The commit that is checked out is tested. Mounts and
# processes live in namespaces of their own and end with the script. NEURONPIPE_BIND names more folders to be seen inside
# (wheels, certificates); PIP_* and /etc/pip.conf hold inside as they do here.
# NEURONPIPE_TEST_SLOWER: how many times longer the tests wait than usual, 10 unless it says otherwise.
# Exit status: that of the tests; 2 when something is missing.
set -eu

root=${1:?usage: arm64.sh ROOT [PYTEST ARGUMENTS...]}
shift
mkdir -p "$root"
root=$(cd "$root" && pwd -P)
checkout=$(cd "$(dirname "$0")/../.." && pwd -P)
group=/sys/fs/cgroup/cpu/neuronpipe-arm64

say() { printf 'arm64: %s\n' "$*" >&2; }

lacking() {
    say "$1"
    exit 2
}

[ "$(id -u)" = 0 ] || lacking "only root can make and enter another root; start it with sudo"
for tool in debootstrap qemu-aarch64-static update-binfmts; do
    command -v "$tool" >/dev/null || lacking "no $tool; apt-get install debootstrap qemu-user-static binfmt-support"
done

if [ "${NEURONPIPE_INSIDE:-}" != 1 ]; then
    if [ ! -e /proc/sys/fs/binfmt_misc/status ]; then
        mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    fi
    update-binfmts --enable qemu-aarch64 2>/dev/null || true
    [ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || lacking "the kernel does not start Arm programs; see update-binfmts --display"
    if [ ! -e "$root/complete" ]; then
        say "making the Debian in $root"
        debootstrap --foreign --arch=arm64 --variant=minbase \
            --include=python3,python3-venv,python3-dev,gcc,libc6-dev,ca-certificates,git bookworm "$root"
        chroot "$root" /debootstrap/debootstrap --second-stage
        touch "$root/complete"
    fi
    # As most phones: dot products and matrices of int8, no scalable vectors. With QEMU 7.2's matrix extension (SME), products of
    # float32 matrices in numpy's OpenBLAS come out as no numbers at all.
    export NEURONPIPE_INSIDE=1 QEMU_CPU="${QEMU_CPU:-max,sve=off,sme=off}"
    ulimit -l 64
    if [ -d /sys/fs/cgroup/cpu ] && mkdir -p "$group" 2>/dev/null; then
        echo 100000 >"$group/cpu.cfs_period_us"
        echo $((75000 * $(nproc))) >"$group/cpu.cfs_quota_us"
        echo $$ >"$group/tasks"
    else
        say "no control groups of version 1: processor time is not limited"
    fi
    exec unshare --mount --pid --fork --kill-child "$0" "$root" "$@"
fi

# ---- in namespaces of our own --------------------------------------------------------------------------------
mount --make-rprivate /
mkdir -p "$root/proc" "$root/sys" "$root/src"
mount -t proc proc "$root/proc"

mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/pts"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts" # terminals, for tests of what is shown on one
ln -s pts/ptmx "$root/dev/ptmx"

mount -t tmpfs -o mode=755 tmpfs "$root/sys"
number=0
while [ "$number" -lt "$(nproc --all)" ]; do
    folder=$root/sys/devices/system/cpu/cpu$number
    mkdir -p "$folder"
    # The first of four is little; the rest in turn as fast as a phone's middle and big ones.
    case $((number % 4)) in 0) echo 325 ;; 1) echo 1024 ;; *) echo 830 ;; esac >"$folder/cpu_capacity"
    number=$((number + 1))
done
mkdir -p "$root/sys/fs/cgroup"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"

cp /etc/resolv.conf "$root/etc/resolv.conf"
[ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/pip.conf"
for folder in /etc/ssl/certs ${NEURONPIPE_BIND:-}; do
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
done

# The same clone every time: only what changed is compiled again.
copy=$root/src/neuronpipe
[ -d "$copy/.git" ] || git clone --quiet --no-hardlinks "file://$checkout" "$copy"
git -C "$copy" fetch --quiet "file://$checkout" HEAD
git -C "$copy" checkout --quiet --force --detach FETCH_HEAD

export NEURONPIPE_TEST_SLOWER="${NEURONPIPE_TEST_SLOWER:-10}"

inside() { # inside SCRIPT [ARGUMENTS...]: in the checkout
    script=$1
    shift
    chroot "$root" /usr/bin/env HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        sh -euc "cd /src/neuronpipe; $script" inside "$@"
}

inside 'test ! -e /dev/shm && ulimit -l && uname -m'
say "setting up"
inside './launch/neuronpipe --version && .venv/bin/pip install --quiet pytest hypothesis openai'
say "the doctor"
inside './launch/neuronpipe doctor' || [ $? = 1 ]
if [ $# = 0 ]; then
    say "the folder for adb, started from outside: this machine has no Arm library that it could borrow"
    inside 'rm -rf /src/portable && sh launch/portable.sh /src/portable'
    env -i PATH=/usr/bin:/bin QEMU_CPU="$QEMU_CPU" "$root/src/portable/neuronpipe" run -p 'def fibonacci(n):' -n 8 --json

    # Everything but the page, for which there is no browser here, and what the emulator keeps from passing.
    set -- tests/unit tests/conformance tests/integration tests/faults --ignore-glob 'tests/integration/test_page*'
    while read -r test reason; do
        say "left out: $test: $reason"
        set -- "$@" --deselect "tests/$test"
    done <<LEFT_OUT
unit/test_monitor.py::test_processor_time_and_memory_of_this_very_process  a process sees no processor time of its own
integration/test_demo.py::test_it_is_idle_in_little_memory  the emulator's own memory counts
integration/test_memory.py  the emulator's own memory counts
integration/test_gateway_ending.py::test_a_run_that_ends_tells_whoever_waits_and_whoever_comes  the supervisor waits no longer than elsewhere
LEFT_OUT
fi
say "pytest $*"
inside 'exec .venv/bin/python -m pytest -o faulthandler_timeout=900 "$@"' "$@"
