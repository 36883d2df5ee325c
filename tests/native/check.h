/* Checks for the native tests: CHECK(condition, format, ...) counts a failure and continues; main ends with `return
 * checks_report();`. A program that checked nothing, because an instruction set is missing for example, exits with 77:
 * skipped. */
#ifndef NP_TESTS_CHECK_H
#define NP_TESTS_CHECK_H
#include <stdint.h>
#include <stdio.h>

enum { CHECKS_SKIPPED = 77 };

static long checks_done, checks_failed;

#define CHECK(condition, ...)                                                             \
    do {                                                                                  \
        checks_done++;                                                                    \
        if (!(condition) && ++checks_failed <= 20) {                                      \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);               \
            fprintf(stderr, __VA_ARGS__);                                                 \
            fprintf(stderr, "\n");                                                        \
        }                                                                                 \
    } while (0)

static inline int checks_report(void) {
    printf("%ld checks, %ld failed\n", checks_done, checks_failed);
    return checks_failed ? 1 : checks_done ? 0 : CHECKS_SKIPPED;
}

/* Pseudo-random numbers, the same in every run. */
static uint64_t random_state = 0x243f6a8885a308d3u;

static inline uint32_t random_bits(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static inline float random_float(void) { return (float)((int32_t)random_bits() * 0x1p-31); } /* in [-1, 1) */
#endif
