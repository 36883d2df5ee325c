/* Checks for native tests with several processes or threads: a failed check prints its place and ends the program (a
 * forked child exits with status 1), since the others would wait for ever. */
#ifndef NP_TESTS_REQUIRE_H
#define NP_TESTS_REQUIRE_H
#include <stdio.h>
#include <stdlib.h>

#define REQUIRE(condition)                                                          \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

/* REQUIRE for two integers; prints both. */
#define REQUIRE_EQUAL(left, right)                                                                              \
    do {                                                                                                        \
        const long long require_left = (long long)(left), require_right = (long long)(right);                   \
        if (require_left != require_right) {                                                                    \
            fprintf(stderr, "%s:%d: failed: %s == %s (%lld, %lld)\n", __FILE__, __LINE__, #left, #right,        \
                    require_left, require_right);                                                               \
            exit(1);                                                                                            \
        }                                                                                                       \
    } while (0)

#endif
