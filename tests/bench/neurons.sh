#!/bin/sh
# Speed of the neurons of predicted mode on this machine: neurons.sh [TEXTS [ROUNDS [OPTION...]]], as in neurons.c; two idle cores, 1 GiB of memory.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$root/build/bench"
# shellcheck disable=SC2046
${CC:-cc} -O3 -std=gnu11 -D_GNU_SOURCE -ffp-contract=off -fno-math-errno -I"$root/native" -o "$root/build/bench/neurons" \
    "$root/tests/bench/neurons.c" $(find "$root/native" -name '*.c' ! -name '_*') -lm -lpthread
exec "$root/build/bench/neurons" "$@"
