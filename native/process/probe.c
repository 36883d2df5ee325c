/* Reading memory and doing nothing else: what a device profile measures. */
#include "neuronpipe.h"

#include <string.h>

enum { AHEAD_BYTES = 1024, LINE_BYTES = 64 };
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
        const uint8_t *after = group + 1 < groups ? from + chosen(group + 1, every, turn) * piece_bytes : here;
        for (size_t at = 0; at < piece_bytes; at += LINE_BYTES) {
            const size_t ahead = at + AHEAD_BYTES;
            if (ahead < piece_bytes)
                __builtin_prefetch(here + ahead);
            else if (ahead - piece_bytes < piece_bytes)
                __builtin_prefetch(after + (ahead - piece_bytes));
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
