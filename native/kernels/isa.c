/* The choice of the instruction set: np_isa_select, else NEURONPIPE_ISA at the first use, else the best one of this
 * machine. */
#include "kernels/isa.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const np_isa *const all[] = {
    /* best first */
#if defined(__x86_64__)
    &np_isa_amx, &np_isa_avx512, &np_isa_avx2,
#elif defined(__aarch64__)
    &np_isa_dotprod, &np_isa_neon,
#endif
    &np_isa_scalar,
};
enum { ALL = sizeof all / sizeof all[0] };

static _Atomic(const np_isa *) current;

static const np_isa *find(const char *name) {
    for (int i = 0; i < ALL; i++)
        if ((!name || strcmp(name, all[i]->name) == 0) && all[i]->runs_here()) return all[i];
    return NULL;
}

/* Racing threads store the same result. */
static const np_isa *choose_first(void) {
    const char *name = getenv("NEURONPIPE_ISA");
    const np_isa *isa = find(name && *name ? name : NULL);
    const np_isa *none = NULL;
    if (isa && !atomic_compare_exchange_strong(&current, &none, isa)) isa = none;
    return isa;
}

static const np_isa *in_use(void) {
    const np_isa *isa = atomic_load_explicit(&current, memory_order_acquire);
    return isa ? isa : choose_first();
}

const np_isa *np_isa_current(void) {
    const np_isa *isa = in_use();
    if (!isa) {
        fprintf(stderr, "NEURONPIPE_ISA=%s: not on this machine; unset it or use one of %s\n", getenv("NEURONPIPE_ISA"),
                np_isa_names());
        abort();
    }
    return isa;
}

const char *np_isa_select(const char *name) {
    const np_isa *isa = find(name);
    if (!isa) return NULL;
    atomic_store_explicit(&current, isa, memory_order_release);
    return isa->name;
}

const char *np_isa_name(void) {
    const np_isa *isa = in_use();
    return isa ? isa->name : NULL;
}

const char *np_isa_names(void) {
    static _Thread_local char names[64];
    names[0] = 0;
    for (int i = 0; i < ALL; i++) {
        if (!all[i]->runs_here()) continue;
        if (names[0]) strcat(names, ",");
        strcat(names, all[i]->name);
    }
    return names;
}
