/* Reading memory and doing nothing else: what a device profile measures. */
#include "neuronpipe.h"

#include <string.h>

enum { AHEAD_BYTES = 1024, LINE_BYTES = 64 };
typedef uint64_t lanes __attribute__((vector_size(16))); /* the width that every target has */

/* Numbers that need no table, so that the measured memory is all that is read. */
static size_t step_of(uint32_t *state, uint32_t every) {
    *state = *state * 1664525u + 1013904223u;
    return every < 2 ? 1 : 1 + (*state >> 16) % (2 * every - 1);
}

uint64_t np_probe_read(const void *memory, size_t bytes, size_t piece_bytes, uint32_t every, uint64_t *sum) {
    if (memory == NULL || piece_bytes < LINE_BYTES || piece_bytes % LINE_BYTES || every == 0 || every > 1024 ||
        sum == NULL)
        return 0;
    const uint8_t *from = memory;
    const size_t pieces = bytes / piece_bytes;
    lanes a = {0}, b = {0}, c = {0}, d = {0};
    uint64_t read_bytes = 0;
    uint32_t state = 77;
    for (size_t piece = 0, next; piece < pieces; piece = next) {
        next = piece + step_of(&state, every);
        const uint8_t *here = from + piece * piece_bytes;
        const uint8_t *after = next < pieces ? from + next * piece_bytes : here;
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
