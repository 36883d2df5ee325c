/* Speed of the kernels on this machine: tests/bench/kernels.sh [ISA] [PART...]. Figures are GB/s of quants and scales (the best of
 * several runs), of arithmetic as multiply-adds per nanosecond and core, and of small kernels microseconds. */
#include "neuronpipe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ARENA_BYTES ((size_t)2560 << 20) /* more than any cache; a child shares its pages and page tables */

static uint8_t *arena;
static const char *const type_names[] = {"f16", "q8", "q4"};
static char **parts;
static int part_count;

/* Of this process: other work on the same core does not count, its traffic to memory does. */
static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int wanted(const char *part) {
    for (int i = 0; i < part_count; i++)
        if (strcmp(parts[i], part) == 0) return 1;
    return part_count == 0;
}

static void *room(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p) exit(1);
    memset(p, 1, bytes);
    return p;
}

static void *activations_of(int type, size_t n, size_t tokens, size_t *stride) {
    *stride = (np_activation_bytes(type, n) + 63) / 64 * 64;
    uint8_t *out = room(tokens * *stride);
    float *x = room(4 * n);
    for (size_t t = 0; t < tokens; t++) {
        for (size_t j = 0; j < n; j++) x[j] = (float)((j * 7919 + t) % 255) - 127.0f;
        np_activation_prepare(type, x, n, out + t * *stride);
    }
    free(x);
    return out;
}

/* Run work(context, half) in one process or in two at once, each on its half of the arena; best seconds of three. The processes
 * start together, at a byte in a pipe, and the slower one counts. */
static double timed(void (*work)(const void *context, int half), const void *context, int processes) {
    double best = 1e9;
    for (int run = 0; run < 3; run++) {
        int start[2], took[2];
        if (pipe(start) || pipe(took)) exit(1);
        for (int half = 0; half < processes; half++)
            if (fork() == 0) {
                char go;
                if (read(start[0], &go, 1) != 1) _exit(1);
                const double from = seconds();
                work(context, half);
                const double spent = seconds() - from;
                _exit(write(took[1], &spent, sizeof spent) != sizeof spent);
            }
        usleep(2000);
        if (write(start[1], "gg", (size_t)processes) < 0) exit(1);
        double slowest = 0;
        for (int half = 0; half < processes; half++) {
            double spent;
            if (read(took[0], &spent, sizeof spent) != sizeof spent) exit(1);
            slowest = spent > slowest ? spent : slowest;
        }
        while (wait(NULL) > 0) {}
        best = slowest < best ? slowest : best;
        for (int i = 0; i < 2; i++) close(start[i]), close(took[i]);
    }
    return best;
}

/* ---- rows one after the other ---- */
typedef struct {
    int type;
    size_t n, rows, repeats, stride;
    const uint8_t *activation;
} rows_case;

static void dot_rows(const void *context, int half) {
    const rows_case *c = context;
    const uint8_t *quants = arena + half * (ARENA_BYTES / 2), *scales = quants + c->rows * np_quant_bytes(c->type, c->n);
    float *out = room(4 * c->rows);
    for (size_t i = 0; i < c->repeats; i++)
        np_dot_rows(c->type, quants, scales, c->rows, c->n, c->activation, c->stride, 1, NULL, out, c->rows);
}

static void add_each(const void *context, int half) {
    const rows_case *c = context;
    const uint8_t *quants = arena + half * (ARENA_BYTES / 2), *scales = quants + c->rows * np_quant_bytes(c->type, c->n);
    float *y = room(4 * c->n);
    for (size_t i = 0; i < c->repeats; i++)
        for (size_t r = 0; r < c->rows; r++)
            np_add_row(c->type, quants + r * np_quant_bytes(c->type, c->n), scales + r * np_scale_bytes(c->type, c->n), c->n, 0.1f, y);
}

static void bench_rows(void) {
    static const struct {
        size_t n, bytes;
        const char *where;
    } cases[] = {{4096, (size_t)1 << 30, "DRAM"}, {4096, 400 << 10, "L2"}, {352, (size_t)1 << 30, "DRAM"}, {352, 400 << 10, "L2"}, {64, (size_t)1 << 30, "DRAM"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
        for (int type = NP_Q4; type >= NP_F16; type--) {
            rows_case c = {.type = type, .n = cases[k].n};
            const size_t row_bytes = np_quant_bytes(type, c.n) + np_scale_bytes(type, c.n);
            c.rows = cases[k].bytes / row_bytes;
            c.repeats = cases[k].bytes < 1 << 20 ? 500 : 1;
            c.activation = activations_of(type, c.n, 1, &c.stride);
            const double bytes = (double)(c.rows * c.repeats * row_bytes) * 1e-9;
            printf("rows of %zu %s from %s: dot %.1f GB/s, two processes %.1f;", c.n, type_names[type], cases[k].where,
                   bytes / timed(dot_rows, &c, 1), 2 * bytes / timed(dot_rows, &c, 2));
            printf(" np_add_row each %.1f, %.1f\n", bytes / timed(add_each, &c, 1), 2 * bytes / timed(add_each, &c, 2));
            free((void *)c.activation);
        }
}

/* ---- scattered rows: about every tenth slot, ascending ---- */
typedef struct {
    int type;
    size_t n, rows, stride;
    const void **quants[2], **scales[2];
    float *a, *y;
    const uint8_t *activation;
} scattered_case;

static void dot_scattered(const void *context, int half) {
    const scattered_case *c = context;
    float *out = room(4 * c->rows);
    for (size_t r = 0; r < c->rows; r += 512) /* as many as a block of work has */
        np_dot_scattered(c->type, c->quants[half] + r, c->scales[half] + r, 512, c->n, 0, c->activation, out + r);
}

static void add_rows(const void *context, int half) {
    const scattered_case *c = context;
    for (size_t r = 0; r < c->rows; r += 512) np_add_rows(c->type, c->quants[half] + r, c->scales[half] + r, c->a, 512, c->n, c->y);
}

static void add_row_each(const void *context, int half) {
    const scattered_case *c = context;
    for (size_t r = 0; r < c->rows; r++) np_add_row(c->type, c->quants[half][r], c->scales[half][r], c->n, c->a[0], c->y);
}

static void read_only(const void *context, int half) {
    const scattered_case *c = context;
    const size_t bytes = np_quant_bytes(c->type, c->n) + np_scale_bytes(c->type, c->n);
    typedef uint64_t lanes __attribute__((vector_size(64)));
    lanes sum = {0};
    for (size_t r = 0; r < c->rows; r++) {
        const uint8_t *row = c->quants[half][r], *next = r + 1 < c->rows ? c->quants[half][r + 1] : row;
        for (size_t i = 0; i < bytes; i += 64) {
            __builtin_prefetch(next + i);
            sum ^= *(const lanes *)(const void *)(row + i);
        }
    }
    __asm__ volatile("" ::"r"(&sum) : "memory");
}

static void bench_scattered(void) {
    static const size_t slots[] = {2816, 4096};
    for (int type = NP_Q4; type >= NP_Q8; type--)
        for (size_t k = 0; k < 2; k++) {
            scattered_case c = {.type = type, .n = 4096};
            const size_t slot = type == NP_Q4 ? slots[k] : slots[k] + 2048, per_half = ARENA_BYTES / 2 / slot;
            uint32_t random = 77;
            for (int half = 0; half < 2; half++) {
                c.quants[half] = room(per_half * sizeof(void *));
                c.scales[half] = room(per_half * sizeof(void *));
                size_t row = 0;
                for (size_t at = 0;; row++) {
                    random = random * 1664525 + 1013904223;
                    at += 1 + (random >> 16) % 19;
                    if (at >= per_half) break;
                    c.quants[half][row] = arena + half * (ARENA_BYTES / 2) + at * slot;
                    c.scales[half][row] = (const uint8_t *)c.quants[half][row] + np_quant_bytes(type, c.n);
                }
                c.rows = half && row > c.rows ? c.rows : row;
                c.rows -= c.rows % 512;
            }
            c.a = room(4 * 512), c.y = room(4 * c.n);
            for (int i = 0; i < 512; i++) c.a[i] = 0.01f * (float)i;
            c.activation = activations_of(type, c.n, 1, &c.stride);
            const double bytes = (double)(c.rows * (np_quant_bytes(type, c.n) + np_scale_bytes(type, c.n))) * 1e-9;
            printf("scattered %s, slots of %zu: ", type_names[type], slot);
            static const struct {
                const char *name;
                void (*work)(const void *, int);
            } works[] = {{"read", read_only}, {"np_dot_scattered", dot_scattered}, {"np_add_rows", add_rows}, {"np_add_row each", add_row_each}};
            for (int w = 0; w < 4; w++)
                printf("%s %.1f / %.1f%s", works[w].name, bytes / timed(works[w].work, &c, 1), 2 * bytes / timed(works[w].work, &c, 2),
                       w < 3 ? ", " : " GB/s (one / two processes)\n");
        }
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IONBF, 0);
    if (argc > 1 && !np_isa_select(argv[1])) {
        fprintf(stderr, "kernels: instruction set '%s' is not here; use one of %s\n", argv[1], np_isa_names());
        return 2;
    }
    parts = argv + 2, part_count = argc > 2 ? argc - 2 : 0;
    arena = mmap(NULL, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (arena == MAP_FAILED) {
        perror("kernels: 2.5 GiB of memory");
        return 1;
    }
    memset(arena, 0x11, ARENA_BYTES);
    printf("instruction set %s\n", np_isa_name());
    if (wanted("rows")) bench_rows();
    if (wanted("scattered")) bench_scattered();
    return 0;
}
