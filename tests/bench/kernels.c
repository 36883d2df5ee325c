/* Speed of the kernels on this machine: tests/bench/kernels.sh [ISA [PART...]], parts rows, scattered, few, panel, small. Figures are
 * GB/s of quants and scales, for many tokens multiply-adds per nanosecond and core, for small kernels microseconds: the best of
 * several runs, in processor time. */
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
static const char *const type_names[] = {"f16", "q8", "q4", "q3", "q4k", "q5k", "q6k"};
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
                work(context, half); /* the first touch of a page by a process costs more than reading it */
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

static void bench_rows(void) {
    static const struct {
        size_t n, bytes;
        const char *where;
    } cases[] = {{4096, (size_t)700 << 20, "DRAM"}, {4096, 400 << 10, "L2"}, {352, (size_t)700 << 20, "DRAM"}, {352, 400 << 10, "L2"}, {64, (size_t)700 << 20, "DRAM"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
        for (int type = NP_Q6K; type >= NP_F16; type--) {
            rows_case c = {.type = type, .n = cases[k].n};
            const size_t row_bytes = np_quant_bytes(type, c.n) + np_scale_bytes(type, c.n);
            c.rows = cases[k].bytes / row_bytes;
            c.repeats = cases[k].bytes < 1 << 20 ? 500 : 1;
            c.activation = activations_of(type, c.n, 1, &c.stride);
            const double bytes = (double)(c.rows * c.repeats * row_bytes) * 1e-9;
            printf("rows of %zu %s from %s: dot %.1f GB/s, two processes %.1f\n", c.n, type_names[type], cases[k].where,
                   bytes / timed(dot_rows, &c, 1), 2 * bytes / timed(dot_rows, &c, 2));
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
        np_dot_scattered(c->type, c->quants[half] + r, c->scales[half] + r, 512, c->n, NULL, c->activation, 0, 1, out + r, 0);
}

static void add_rows(const void *context, int half) {
    const scattered_case *c = context;
    for (size_t r = 0; r < c->rows; r += 512) np_add_rows(c->type, c->quants[half] + r, c->scales[half] + r, c->a, 512, c->n, c->y);
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
    for (int type = NP_Q6K; type >= NP_Q8; type--)
        for (size_t k = 0; k < 2 && type != NP_Q3; k++) { /* rows of q3 are never added */
            scattered_case c = {.type = type, .n = 4096};
            const size_t wider = type == NP_Q8 ? 2048 : type == NP_Q5K ? 512 : type == NP_Q6K ? 1024 : 0;
            const size_t slot = slots[k] + wider, per_half = ARENA_BYTES / 2 / slot;
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
            } works[] = {{"read", read_only}, {"np_dot_scattered", dot_scattered}, {"np_add_rows", add_rows}};
            for (int w = 0; w < 3; w++)
                printf("%s %.1f / %.1f%s", works[w].name, bytes / timed(works[w].work, &c, 1), 2 * bytes / timed(works[w].work, &c, 2),
                       w < 2 ? ", " : " GB/s (one / two processes)\n");
        }
}

/* ---- many tokens, and the small kernels: in this process alone ---- */
static double best_seconds(int times, int calls, void (*work)(void *), void *context) {
    double best = 1e9;
    for (int i = 0; i < times; i++) {
        const double from = seconds();
        for (int call = 0; call < calls; call++) work(context);
        const double spent = (seconds() - from) / calls;
        best = spent < best ? spent : best;
    }
    return best;
}

typedef struct {
    int type;
    size_t n, tokens, stride;
    const uint8_t *activations;
    uint8_t *panel;
    const void *quants[512], *scales[512];
    float *out;
} panel_case;

static void panel_prepare(void *context) {
    panel_case *c = context;
    np_panel_prepare(c->type, c->activations, c->stride, c->tokens, c->n, c->panel);
}

static void panel_dot(void *context) {
    panel_case *c = context;
    np_dot_panel(c->type, c->quants, c->scales, 512, c->n, c->panel, c->tokens, NULL, c->out, 512);
}

static void rows_of_many(void *context) {
    panel_case *c = context;
    np_dot_rows(c->type, c->quants[0], c->scales[0], 512, c->n, c->activations, c->stride, c->tokens, NULL, c->out, 512);
}

static void scattered_few(void *context) {
    panel_case *c = context;
    np_dot_scattered(c->type, c->quants, c->scales, 72, c->n, NULL, c->activations, c->stride, c->tokens, c->out, 512);
}

static void bench_panel(void) {
    static const size_t tokens[] = {512, 128, 32, 16};
    for (int type = NP_Q6K; type >= NP_Q8; type--)
        for (int k = 0; k < 4 && type != NP_Q3; k++) { /* as fast as q4 */
            panel_case c = {.type = type, .n = 4096, .tokens = tokens[k]};
            c.activations = activations_of(type, c.n, c.tokens, &c.stride);
            c.panel = room(np_panel_bytes(type, c.n, c.tokens));
            c.out = room(4 * 512 * c.tokens);
            for (size_t r = 0; r < 512; r++) {
                c.quants[r] = arena + r * np_quant_bytes(type, c.n);
                c.scales[r] = arena + 512 * np_quant_bytes(type, c.n) + r * np_scale_bytes(type, c.n);
            }
            const double prepare = best_seconds(5, 1, panel_prepare, &c), work = 1e-9 * 512.0 * (double)(c.n * c.tokens);
            printf("%s, 512 rows of 4096, %zu tokens: panel %.0f multiply-adds/ns, prepared in %.0f us, np_dot_rows %.0f\n",
                   type_names[type], c.tokens, work / best_seconds(5, 1, panel_dot, &c), 1e6 * prepare,
                   work / best_seconds(3, 1, rows_of_many, &c));
        }
}

/* As many rows as a block of work has, in the first or second cache, with the tokens of a few texts. */
static void bench_few(void) {
    static const size_t tokens[] = {1, 2, 3, 4, 8}, widths[] = {320, 4096};
    for (int type = NP_Q6K; type >= NP_F16; type--)
        for (int w = 0; w < 2; w++) {
            panel_case c = {.type = type, .n = widths[w]};
            c.out = room(4 * 512 * 8);
            for (size_t r = 0; r < 72; r++) {
                c.quants[r] = arena + r * np_quant_bytes(type, c.n);
                c.scales[r] = arena + 72 * np_quant_bytes(type, c.n) + r * np_scale_bytes(type, c.n);
            }
            printf("%s, 72 rows of %zu, multiply-adds/ns:", type_names[type], c.n);
            for (int k = 0; k < 5; k++) {
                c.tokens = tokens[k];
                c.activations = activations_of(type, c.n, c.tokens, &c.stride);
                printf(" %zu tokens %.0f", c.tokens, 72e-9 * (double)(c.n * c.tokens) / best_seconds(20, 100, scattered_few, &c));
                free((void *)c.activations);
            }
            printf("\n");
            free(c.out);
        }
}

typedef struct {
    float *x, *y, *scores;
    size_t positions;
    uint16_t *keys;
} small_case;

static void small_sum_tree(void *c) { np_sum_tree(((small_case *)c)->x, 28, 4096, 4096, ((small_case *)c)->y); }
static void small_add(void *c) { np_add(((small_case *)c)->x, 4096, ((small_case *)c)->y); }
static void small_norm(void *c) { np_rms_norm(((small_case *)c)->x, ((small_case *)c)->x, 4096, 1e-5f, ((small_case *)c)->y); }
static void small_prepare(void *c) { np_activation_prepare(NP_Q4, ((small_case *)c)->x, 4096, ((small_case *)c)->y); }
static void small_rope(void *c) { np_rope(((small_case *)c)->x, 128, ((small_case *)c)->y, 77); }
static void small_attend(void *context) {
    small_case *c = context;
    for (int h = 0; h < 4; h++) np_attend(c->x, 1, c->keys, c->keys + c->positions * 128, c->positions, 128, 0.1f, 0, NULL, c->scores, c->y);
}
static void small_attend_heads(void *context) {
    small_case *c = context;
    np_attend(c->x, 4, c->keys, c->keys + c->positions * 128, c->positions, 128, 0.1f, 0, NULL, c->scores, c->y);
}

static void bench_small(void) {
    small_case c = {.x = room(4 * 4096 * 28), .y = room(4 * 4096), .scores = room(16 * 4096), .keys = room(4096 * 2 * 256)};
    static const struct {
        const char *name;
        void (*work)(void *);
        size_t positions;
    } all[] = {{"np_sum_tree of 28 rows of 4096", small_sum_tree, 0},
               {"np_add of 4096", small_add, 0},
               {"np_rms_norm of 4096", small_norm, 0},
               {"np_activation_prepare of 4096, q4", small_prepare, 0},
               {"np_rope of 128", small_rope, 0},
               {"np_attend, one by one, 4 heads of 128, 512 positions", small_attend, 512},
               {"np_attend, 4 heads together, the same", small_attend_heads, 512},
               {"np_attend, one by one, 4 heads of 128, 4096 positions", small_attend, 4096},
               {"np_attend, 4 heads together, the same", small_attend_heads, 4096}};
    memset(c.x, 0, 4 * 4096 * 28);
    memset(c.y, 0, 4 * 4096);
    for (size_t i = 0; i < 4096 * 256; i++) c.keys[i] = (uint16_t)(0x2c00 + i % 700);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        c.positions = all[i].positions;
        printf("%s: %.2f us\n", all[i].name, 1e6 * best_seconds(20, 20, all[i].work, &c));
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
    if (wanted("few")) bench_few();
    if (wanted("panel")) bench_panel();
    if (wanted("small")) bench_small();
    return 0;
}
