/* Speed of the neurons of predicted mode by themselves, in memory: tests/bench/neurons.sh [TEXTS [ROUNDS [OPTION...]]], options one (one
 * participant), read (the same bytes read, and nothing computed), random (slots in random order), huge (slots in huge pages), small (the 1B's shape). The engine's own feed-forward, without a predictor's work,
 * over layers of the 7B's shape that no cache holds; predictions have the frequencies of its profile. Prints the median and the best
 * round, what its rows weigh, and a checksum of the residual stream: the same for the same shape and texts, whatever the build. */
#include "engine/engine.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { LAYERS = 8, MOST_TEXTS = 8, BLOCKS = 32, MOST_ROUNDS = 1000 };

typedef struct {
    np_shape shape;
    np_fixed fixed;
    np_layer layers[LAYERS];
    np_shared shared;
    float *residual_at_first;
    uint8_t *predicted[LAYERS];
    uint32_t texts, participants, epoch, words[16];
    np_barrier between, inside;
    uint64_t windows[2];
    uint32_t rounds, counted;
    int reads;
    double seconds[MOST_ROUNDS];
    np_engine_counters counters[2];
} bench;

static bench b;

static uint64_t random_word(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static void *room(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p) exit(1);
    memset(p, 0, bytes);
    return p;
}

static int given(int argc, char **argv, const char *option) {
    for (int i = 3; i < argc; i++)
        if (strcmp(argv[i], option) == 0) return 1;
    return 0;
}

/* The 7B as it was packed, or the 1B: of a slot the bytes that its rows fill. */
static np_shape shape_of(int small) {
    const uint32_t width = small ? 2048 : 4096, neurons = small ? 7168 : 14336, each = small ? 2 : 1;
    return (np_shape){
        .width = width, .neurons = neurons, .layers = LAYERS, .query_heads = 1, .key_heads = 1, .head_width = 128, .vocabulary = 1,
        .context_tokens = 1, .experts = 1, .experts_per_token = 1, .router_groups = 1, .groups_per_token = 1, .routed_scale = 1.0f, .rotary_scale = 1.0f, .norm_epsilon = 1e-5f, .rotary = 1, .type = NP_Q4,
        .activation = NP_DRELU, .embedding_scale = 1, .logit_scale = 1, .attention_scale = 1, .local_attention_scale = 1, .residual_scale = 0x1p-10f, .gated = 1,
        .predictor_rank = 32, .predictor_type = NP_Q4, .predictor_reads = NP_READS_ATTENTION,
        .cluster_neurons = each, .clusters = neurons / each, .block_neurons = neurons / BLOCKS, .blocks = BLOCKS, .slot_bytes = {2816, 4096},
        .gate = {NP_TRIGGER, 0, NP_TRIGGER, 2048, NP_Q4}, .up = {NP_VALUE, 0, NP_TRIGGER, 2304, NP_Q4}, .down = {NP_VALUE, 2048, NP_TRIGGER, 2560, NP_Q4},
    };
}

static uint8_t *memory_of(size_t bytes, int huge) {
    const size_t page = (size_t)2 << 20;
    if (huge) {
        uint8_t *p = mmap(NULL, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) exit(1);
        p = (uint8_t *)(((uintptr_t)p + page - 1) / page * page);
        if (np_memory_advise_huge(p, bytes)) fprintf(stderr, "no huge pages\n");
        return p;
    }
    const int file = memfd_create("slots", 0);
    if (file < 0 || ftruncate(file, (off_t)bytes)) exit(1);
    uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (p == MAP_FAILED) exit(1);
    return p;
}

/* Rows of one matrix, of which so many in 1024 bytes lose what is negative: inputs are mostly positive, and so are then most products. */
static void tilt(uint8_t *rows, uint32_t in_1024) {
    for (size_t j = 0; j < 2048; j++)
        if (random_word() % 1024 < in_1024) rows[j] |= 0x88;
}

/* Random quants, small scales. About nine in ten of those predicted fire, and three in four of these are active. */
static void fill_slots(const np_shape *s, uint8_t *slots[2]) {
    const size_t count = (size_t)LAYERS * s->clusters;
    for (int part = 0; part < NP_PARTS; part++)
        for (size_t i = 0; i < count * s->slot_bytes[part] / 8; i++) ((uint64_t *)(void *)slots[part])[i] = random_word();
    for (size_t i = 0; i < count; i++) {
        uint8_t *slot = slots[NP_TRIGGER] + i * s->slot_bytes[NP_TRIGGER];
        tilt(slot, 156);
        tilt(slots[NP_VALUE] + i * s->slot_bytes[NP_VALUE], 143);
        for (size_t j = 0; j < 384; j++) ((uint16_t *)(void *)(slot + 2048))[j] = (uint16_t)(0x1c00 + random_word() % 512);
    }
}

/* Present, in slots that follow each other, or in random order. */
static void fill_entries(const np_shape *s, uint32_t *entries[2], int random) {
    const uint32_t count = LAYERS * s->clusters;
    for (int part = 0; part < NP_PARTS; part++) {
        for (uint32_t i = 0; i < count; i++) entries[part][i] = i | NP_ENTRY_PRESENT | NP_ENTRY_REFERENCED | NP_ENTRY_PINNED;
        for (uint32_t i = count - 1; random && i; i--) {
            const uint32_t other = (uint32_t)(random_word() % (i + 1)), word = entries[part][i];
            entries[part][i] = entries[part][other], entries[part][other] = word;
        }
    }
}

/* Hottest neurons first: a quarter of them has four fifths of the predictions, of 8.5 % in all. */
static void predict(const np_shape *s) {
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        b.predicted[layer] = room(s->neurons);
        for (uint32_t i = 0; i < s->neurons; i++) {
            const double often = 0.527 * exp(-6.2 * (double)i / s->neurons);
            for (uint32_t t = 0; t < b.texts; t++)
                if ((double)(random_word() >> 11) * 0x1p-53 < often) b.predicted[layer][i] |= (uint8_t)(1u << t);
        }
    }
}

static np_engine *engine_of(uint32_t participant) {
    const np_engine_config config = {.sequences = MOST_TEXTS, .max_tokens = MOST_TEXTS, .logit_rows = 1, .window_blocks = BLOCKS,
                                     .partial_tokens = MOST_TEXTS, .spin_us = 100000, .bundle = 1, .prefetch = 1, .pipeline = 1};
    np_shared shared = b.shared;
    const char *wrong;
    shared.window = &b.windows[participant];
    np_engine *engine = np_engine_create(&b.shape, &b.fixed, &shared, &config, &wrong);
    if (!engine) {
        fprintf(stderr, "refused: %s\n", wrong ? wrong : "memory");
        exit(1);
    }
    return engine;
}

/* What reading alone takes: all parts of the predicted neurons' clusters once, block by block in turns, the third one ahead fetched. */
static void read_only(uint32_t own, uint32_t layer) {
    typedef uint64_t lanes __attribute__((vector_size(64)));
    const np_shape *s = &b.shape;
    const uint32_t each = s->cluster_neurons, per_block = s->block_neurons / each;
    lanes sum = {0};
    for (uint32_t block = own; block < BLOCKS; block += b.participants) {
        const uint8_t *at[NP_PARTS][4] = {{0}};
        for (uint32_t c = block * per_block, seen = 0; c < (block + 1) * per_block + 3; c++) {
            int named = c >= (block + 1) * per_block;
            for (uint32_t i = 0; !named && i < each; i++) named |= b.predicted[layer][c * each + i];
            if (!named) continue;
            for (int part = 0; part < NP_PARTS; part++) {
                const uint8_t *now = at[part][(seen + 1) % 4], *next = NULL;
                if (c < (block + 1) * per_block)
                    next = b.shared.slots[part] + (size_t)(b.shared.entries[part][layer * s->clusters + c] & NP_ENTRY_SLOT_MASK) * s->slot_bytes[part];
                at[part][seen % 4] = next;
                for (size_t i = 0; i < s->slot_bytes[part]; i += 64) {
                    if (next) __builtin_prefetch(next + i, 0, 2);
                    if (now) sum ^= *(const lanes *)(const void *)(now + i);
                }
            }
            seen++;
        }
    }
    __asm__ volatile("" ::"r"(&sum) : "memory");
}

/* How often another program took a core from this one: rounds in which one did are not counted. */
static long disturbances(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nivcsw;
}

static void meet(void) {
    if (b.participants > 1) np_barrier_wait(&b.between, b.participants, &b.epoch, 0, 1000000, 0);
}

static void *participate(void *argument) {
    const uint32_t own = *(const uint32_t *)argument;
    static const int32_t zeros[MOST_TEXTS];
    np_engine *engine = engine_of(own);
    const np_step step = {.participants = b.participants, .participant = own, .sharers = b.participants, .sharer = own, .end_block = BLOCKS,
                          .count = b.texts, .sequences = zeros, .positions = zeros, .tokens = zeros};
    for (uint32_t round = 0; round < b.rounds; round++) {
        meet();
        if (own == 0) {
            memcpy(b.shared.residual, b.residual_at_first, MOST_TEXTS * b.shape.width * sizeof(float));
            memset(b.shared.claims, 0, np_engine_claims(LAYERS) * sizeof(uint32_t));
        }
        meet();
        const long before = disturbances();
        const uint64_t from = np_clock_ns();
        int done = np_engine_take_step(engine, &step);
        for (uint32_t layer = 0; layer < LAYERS && done >= 0; layer++) {
            engine->shared.predicted = b.predicted[layer];
            if (b.reads)
                read_only(own, layer), done = np_engine_barrier(engine);
            else
                done = np_engine_feed_forward(engine, layer);
        }
        if (done < 0) exit(1);
        const double took = 1e-9 * (double)(np_clock_ns() - from);
        meet();
        if (own == 0 && round > 0 && disturbances() == before) b.seconds[b.counted++] = took;
        if (round == 0) np_engine_read_counters(engine, &b.counters[own]);
    }
    np_engine_destroy(engine);
    return NULL;
}

static int ascending(const void *a, const void *c) {
    return *(const double *)a < *(const double *)c ? -1 : 1;
}

static void make(int argc, char **argv) {
    const np_shape s = b.shape = shape_of(given(argc, argv, "small"));
    const size_t count = (size_t)LAYERS * s.clusters;
    uint8_t *slots[2] = {memory_of(count * s.slot_bytes[0], given(argc, argv, "huge")), memory_of(count * s.slot_bytes[1], given(argc, argv, "huge"))};
    uint32_t *entries[2] = {room(4 * count), room(4 * count)};
    float *weights = room(4 * s.width);
    for (uint32_t j = 0; j < s.width; j++) weights[j] = 1.0f;
    fill_slots(&s, slots);
    fill_entries(&s, entries, given(argc, argv, "random"));
    predict(&s);
    for (int layer = 0; layer < LAYERS; layer++) b.layers[layer] = (np_layer){.first_ffn = (uint32_t)layer, .experts = 1, .ffn_norm = {weights, NULL}};
    b.fixed.layers = b.layers;
    b.residual_at_first = room(4 * MOST_TEXTS * s.width);
    for (uint32_t i = 0; i < MOST_TEXTS * s.width; i++) b.residual_at_first[i] = (float)(random_word() % 2048) * 0x1p-9f - 0.5f;
    b.shared = (np_shared){
        .residual = room(4 * MOST_TEXTS * s.width), .hidden = room(4 * MOST_TEXTS * s.neurons),
        .partials = room((size_t)4 * MOST_TEXTS * BLOCKS * s.width), .ranks = room(4 * MOST_TEXTS * s.predictor_rank), .predicted = b.predicted[0],
        .claims = room(4 * np_engine_claims(LAYERS)), .slots = {slots[0], slots[1]}, .entries = {entries[0], entries[1]},
        .arrivals = &b.words[0], .epoch = &b.epoch, .barrier = &b.inside,
        .requests = {.tail = &b.words[1], .head = &b.words[2], .entries = &b.words[3], .capacity = 1, .asleep = &b.words[4], .doorbell = -1},
    };
}

static double gigabytes(void) {
    const np_engine_counters *c = b.counters;
    const double row = (double)(np_quant_bytes(NP_Q4, b.shape.width) + np_scale_bytes(NP_Q4, b.shape.width));
    return 1e-9 * row * (double)(c[0].gate_rows + c[1].gate_rows + c[0].up_rows + c[1].up_rows + c[0].down_rows + c[1].down_rows);
}

int main(int argc, char **argv) {
    static const uint32_t numbers[2] = {0, 1};
    b.texts = argc > 1 ? (uint32_t)atoi(argv[1]) : 1;
    b.rounds = argc > 2 ? (uint32_t)atoi(argv[2]) : 100;
    b.reads = given(argc, argv, "read");
    b.participants = given(argc, argv, "one") ? 1 : 2;
    if (!b.texts || b.texts > MOST_TEXTS || b.rounds < 2 || b.rounds > MOST_ROUNDS) return 1;
    make(argc, argv);
    pthread_t other;
    if (b.participants > 1 && pthread_create(&other, NULL, participate, (void *)(uintptr_t)&numbers[1])) return 1;
    participate((void *)(uintptr_t)&numbers[0]);
    if (b.participants > 1) pthread_join(other, NULL);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < b.texts * b.shape.width; i++) sum = sum * 31 + ((uint32_t *)(void *)b.shared.residual)[i];
    qsort(b.seconds, b.counted, sizeof *b.seconds, ascending);
    const double median = b.counted ? b.seconds[b.counted / 2] : NAN, best = b.counted ? b.seconds[0] : NAN;
    const np_engine_counters *c = b.counters;
    const double all = (double)b.texts * LAYERS * b.shape.neurons;
    printf("%u texts, %u rounds: median %.3f ms, best %.3f ms a layer; %.1f GB/s of rows read, predicted %.1f %%, fired %.1f, active %.1f; checksum %016llx\n",
           b.texts, b.counted, 1e3 * median / LAYERS, 1e3 * best / LAYERS, gigabytes() / median,
           100 * (double)(c[0].predicted + c[1].predicted) / all, 100 * (double)(c[0].fired + c[1].fired) / all,
           100 * (double)(c[0].active + c[1].active) / all, (unsigned long long)sum);
    return 0;
}
