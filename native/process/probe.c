/* Reading memory and doing nothing else: what a device profile measures. */
#include "neuronpipe.h"

#include <string.h>

/* Pieces that come are fetched into the second-level cache, as the kernels do it: two threads read pieces of 2 KiB a quarter faster for
 * it. One long piece is fetched within itself. */
enum { AHEAD_PIECES = 3, AHEAD_BYTES = 2048, LINE_BYTES = 64 };
typedef uint64_t lanes __attribute__((vector_size(16))); /* the width that every target has */

/* Of each group of `every` pieces one is read: which one looks random, and is another in each of `every` turns, so that what one turn
 * leaves in the caches is of no use to the next. */
static size_t chosen(size_t group, uint32_t every, uint32_t turn) {
    const uint32_t mixed = (uint32_t)group * 2654435761u;
    return group * every + ((mixed >> 16) + turn) % every;
}

uint64_t np_probe_read(const void *memory, size_t bytes, size_t piece_bytes, uint32_t every, uint32_t turn,
                       uint64_t *sum) {
    if (memory == NULL || piece_bytes < LINE_BYTES || piece_bytes % LINE_BYTES || every == 0 || every > 1024 ||
        sum == NULL)
        return 0;
    const uint8_t *from = memory;
    const size_t pieces = bytes / piece_bytes;
    lanes a = {0}, b = {0}, c = {0}, d = {0};
    uint64_t read_bytes = 0;
    const size_t groups = pieces / every;
    turn %= every;
    for (size_t group = 0; group < groups; group++) {
        const uint8_t *here = from + chosen(group, every, turn) * piece_bytes;
        const size_t later = group + AHEAD_PIECES;
        const uint8_t *after = later < groups ? from + chosen(later, every, turn) * piece_bytes : here;
        const int within = piece_bytes > AHEAD_PIECES * AHEAD_BYTES * 4;
        for (size_t at = 0; at < piece_bytes; at += LINE_BYTES) {
            const uint8_t *fetched = within ? here + (at + AHEAD_BYTES < piece_bytes ? at + AHEAD_BYTES : at) : after + at;
            __builtin_prefetch(fetched, 0, 2);
            lanes line[4];
            memcpy(line, here + at, LINE_BYTES);
            a ^= line[0];
            b ^= line[1];
            c ^= line[2];
            d ^= line[3];
        }
        read_bytes += piece_bytes;
    }
    a ^= b ^ c ^ d;
    *sum = a[0] ^ a[1]; /* so that the compiler has to read */
    return read_bytes;
}
