#include "client/sha256.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static uint32_t rotate_right(uint32_t x, int bits)
{
    return x >> bits | x << (32 - bits);
}

/* The first 32 bits of the fractional part. */
static uint32_t fraction(long double x)
{
    return (uint32_t)((x - floorl(x)) * 4294967296.0L);
}

/* FIPS 180-4 defines the constants as fractional parts of the first primes' square roots (8, `start`) and cube roots
 * (64, `round`). */
static void constants(uint32_t start[8], uint32_t round[64])
{
    for (int count = 0, n = 2; count < 64; n++) {
        int prime = 1;
        for (int d = 2; d * d <= n; d++)
            prime &= n % d != 0;
        if (!prime)
            continue;
        if (count < 8)
            start[count] = fraction(sqrtl(n));
        round[count++] = fraction(cbrtl(n));
    }
}

static void compress(uint32_t h[8], const uint32_t k[64], const uint8_t block[64])
{
    uint32_t w[64], v[8];
    for (int t = 0; t < 16; t++)
        w[t] = (uint32_t)block[4 * t] << 24 | (uint32_t)block[4 * t + 1] << 16 | (uint32_t)block[4 * t + 2] << 8 | block[4 * t + 3];
    for (int t = 16; t < 64; t++)
        w[t] = w[t - 16] + w[t - 7] + (rotate_right(w[t - 15], 7) ^ rotate_right(w[t - 15], 18) ^ w[t - 15] >> 3) +
               (rotate_right(w[t - 2], 17) ^ rotate_right(w[t - 2], 19) ^ w[t - 2] >> 10);
    memcpy(v, h, sizeof v);
    for (int t = 0; t < 64; t++) {
        const uint32_t t1 = v[7] + (rotate_right(v[4], 6) ^ rotate_right(v[4], 11) ^ rotate_right(v[4], 25)) + ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[t] + w[t];
        const uint32_t t2 = (rotate_right(v[0], 2) ^ rotate_right(v[0], 13) ^ rotate_right(v[0], 22)) + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int n = 0; n < 8; n++)
        h[n] += v[n];
}

void sha256_text(const void *bytes, size_t count, char text[65])
{
    uint32_t h[8], k[64];
    uint8_t last[128] = {0};
    constants(h, k);
    size_t at = 0;
    for (; count - at >= 64; at += 64)
        compress(h, k, (const uint8_t *)bytes + at);
    const size_t tail_bytes = count - at, padded_bytes = tail_bytes < 56 ? 64 : 128;
    memcpy(last, (const uint8_t *)bytes + at, tail_bytes);
    last[tail_bytes] = 0x80;
    for (int n = 0; n < 8; n++)
        last[padded_bytes - 1 - (size_t)n] = (uint8_t)((uint64_t)count * 8 >> 8 * n);
    for (size_t n = 0; n < padded_bytes; n += 64)
        compress(h, k, last + n);
    for (int n = 0; n < 8; n++)
        snprintf(text + 8 * n, 9, "%08x", h[n]);
}
