#!/bin/sh
# Speed of the kernels on this machine: kernels.sh [ISA [PART...]], parts as in kernels.c; two idle cores and 3 GiB of memory.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$root/build/bench"
# shellcheck disable=SC2046
${CC:-cc} -O3 -std=gnu11 -D_GNU_SOURCE -ffp-contract=off -fno-math-errno -I"$root/native" \
    -o "$root/build/bench/kernels" "$root/tests/bench/kernels.c" "$root"/native/kernels/*.c -lm
exec "$root/build/bench/kernels" "$@"
