/* CRC-32C (Castagnoli, reflected, polynomial 0x1edc6f41). x86-64 and Arm have an instruction that takes 8 bytes; its
 * latency is three cycles, so three streams run interleaved. A stream's register is advanced over the bytes of the
 * streams behind it by tables: the register after a fixed number of zero bytes is linear in its bits. */
#include "flash/crc32c.h"

#include <pthread.h>
#include <string.h>

#include "neuronpipe.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define HAS_INSTRUCTION 1
#define TARGET __attribute__((target("sse4.2")))
#define STEP_8(crc, data) _mm_crc32_u64(crc, data)
#define STEP_1(crc, data) _mm_crc32_u8(crc, data)
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <sys/auxv.h>
#define HAS_INSTRUCTION 1
#define TARGET
#define STEP_8(crc, data) arm_step_8((uint32_t)(crc), data)
#define STEP_1(crc, data) arm_step_1(crc, data)
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
/* Assembly, because compilers differ in how a single function enables the extension's intrinsics. */
static inline uint32_t arm_step_8(uint32_t crc, uint64_t data)
{
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(data));
    return crc;
}
static inline uint32_t arm_step_1(uint32_t crc, uint8_t data)
{
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(data));
    return crc;
}
#else
#define HAS_INSTRUCTION 0
#endif

enum {
    STREAM_BYTES = 1360, /* three streams and 16 bytes make a page */
    AHEAD_BYTES = 8192,  /* prefetched so far ahead: 12.5 instead of 8 GB/s from DRAM (Xeon 6) */
    CACHE_LINE_BYTES = 64,
};

static uint32_t byte_table[256];     /* the register after one byte */
static uint32_t stream_table[4][256]; /* [k][b]: a register of b << 8*k after STREAM_BYTES zero bytes */
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void make_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
        byte_table[byte] = crc;
    }
    uint32_t of_bit[32];
    for (int bit = 0; bit < 32; bit++) {
        of_bit[bit] = 1u << bit;
        for (int i = 0; i < STREAM_BYTES; i++)
            of_bit[bit] = byte_table[of_bit[bit] & 255] ^ of_bit[bit] >> 8;
    }
    for (int k = 0; k < 4; k++)
        for (int byte = 0; byte < 256; byte++)
            for (int bit = 0; bit < 8; bit++)
                if (byte >> bit & 1)
                    stream_table[k][byte] ^= of_bit[8 * k + bit];
}

uint32_t np_crc32c_by_table(uint32_t crc, const void *data, size_t bytes)
{
    pthread_once(&tables_once, make_tables);
    const uint8_t *next = data;
    crc = ~crc;
    for (; bytes; bytes--)
        crc = byte_table[(crc ^ *next++) & 255] ^ crc >> 8;
    return ~crc;
}

#if HAS_INSTRUCTION
int np_crc32c_has_instruction(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2") != 0;
#else
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

static uint32_t over_stream(uint32_t crc)
{
    return stream_table[0][crc & 255] ^ stream_table[1][crc >> 8 & 255] ^ stream_table[2][crc >> 16 & 255] ^
           stream_table[3][crc >> 24];
}

static uint64_t eight_bytes(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

TARGET uint32_t np_crc32c_by_instruction(uint32_t crc, const void *data, size_t bytes)
{
    pthread_once(&tables_once, make_tables);
    const uint8_t *next = data;
    crc = ~crc;
    for (; bytes >= 3 * STREAM_BYTES; bytes -= 3 * STREAM_BYTES, next += 3 * STREAM_BYTES) {
        if (bytes >= 3 * STREAM_BYTES + AHEAD_BYTES)
            for (size_t line = 0; line < 3 * STREAM_BYTES; line += CACHE_LINE_BYTES)
                __builtin_prefetch(next + AHEAD_BYTES + line, 0, 2);
        uint64_t first = crc, second = 0, third = 0; /* the instruction's width: no conversions between its uses */
        for (const uint8_t *at = next; at < next + STREAM_BYTES; at += 8) {
            first = STEP_8(first, eight_bytes(at));
            second = STEP_8(second, eight_bytes(at + STREAM_BYTES));
            third = STEP_8(third, eight_bytes(at + 2 * STREAM_BYTES));
        }
        crc = over_stream(over_stream((uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
    }
    uint64_t rest = crc;
    for (; bytes >= 8; bytes -= 8, next += 8)
        rest = STEP_8(rest, eight_bytes(next));
    crc = (uint32_t)rest;
    for (; bytes; bytes--)
        crc = STEP_1(crc, *next++);
    return ~crc;
}

uint32_t np_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    return np_crc32c_has_instruction() ? np_crc32c_by_instruction(crc, data, bytes) : np_crc32c_by_table(crc, data, bytes);
}
#else
int np_crc32c_has_instruction(void)
{
    return 0;
}

uint32_t np_crc32c_by_instruction(uint32_t crc, const void *data, size_t bytes)
{
    return np_crc32c_by_table(crc, data, bytes);
}

uint32_t np_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    return np_crc32c_by_table(crc, data, bytes);
}
#endif
