/* Run a function under every instruction set of this machine; scalar is the last. */
#ifndef NP_TESTS_ISA_LOOP_H
#define NP_TESTS_ISA_LOOP_H
#include "check.h"
#include "neuronpipe.h"

#include <string.h>

static inline void for_each_isa(void (*test)(const char *isa)) {
    char names[64];
    snprintf(names, sizeof names, "%s", np_isa_names());
    for (char *rest = names, *name; (name = strsep(&rest, ","));) {
        CHECK(np_isa_select(name) != NULL, "%s", name);
        test(name);
    }
}
#endif
