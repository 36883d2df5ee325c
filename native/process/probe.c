/* Memory reads for the device profile's bandwidth measurement. */
#include "neuronpipe.h"

#include <string.h>

/* Pieces are prefetched into the second-level cache, as the kernels do: two threads read pieces of 2 KiB a quarter
 * faster this way. Long pieces are prefetched within themselves. */
enum { AHEAD_PIECES = 3, AHEAD_BYTES = 2048, LINE_BYTES = 64 };
typedef uint64_t lanes __attribute__((vector_size(16))); /* a width that every target has */

/* The piece that is read of each group of `every` pieces: pseudo-random, and different in each turn, so that caches
 * left by one turn do not help the next. */
static size_t chosen_piece(size_t group, uint32_t every, uint32_t turn) {
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
        const uint8_t *piece = from + chosen_piece(group, every, turn) * piece_bytes;
        const size_t ahead = group + AHEAD_PIECES;
        const uint8_t *next_piece = ahead < groups ? from + chosen_piece(ahead, every, turn) * piece_bytes : piece;
        const int within = piece_bytes > AHEAD_PIECES * AHEAD_BYTES * 4;
        for (size_t at = 0; at < piece_bytes; at += LINE_BYTES) {
            const uint8_t *target = within ? piece + (at + AHEAD_BYTES < piece_bytes ? at + AHEAD_BYTES : at) : next_piece + at;
            __builtin_prefetch(target, 0, 2);
            lanes line[4];
            memcpy(line, piece + at, LINE_BYTES);
            a ^= line[0];
            b ^= line[1];
            c ^= line[2];
            d ^= line[3];
        }
        read_bytes += piece_bytes;
    }
    a ^= b ^ c ^ d;
    *sum = a[0] ^ a[1]; /* keeps the compiler from removing the reads */
    return read_bytes;
}
