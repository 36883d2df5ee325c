/* The C tests' one macro. A failed check says where and ends the program (a forked child ends with status 1). */
#ifndef NP_TESTS_CHECK_H
#define NP_TESTS_CHECK_H
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);     \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

/* Like CHECK for two integers, and shows both. */
#define CHECK_EQUAL(left, right)                                                                                  \
    do {                                                                                                          \
        const long long check_left = (long long)(left), check_right = (long long)(right);                         \
        if (check_left != check_right) {                                                                          \
            fprintf(stderr, "%s:%d: failed: %s == %s (%lld, %lld)\n", __FILE__, __LINE__, #left, #right, check_left, \
                    check_right);                                                                                 \
            exit(1);                                                                                              \
        }                                                                                                         \
    } while (0)

#endif
