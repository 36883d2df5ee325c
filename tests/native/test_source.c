/* Experts that the loader reads in place, from two files in GGUF's encoding: rows arrive converted, a second read is
 * compared with the first, and a file that has changed gives nothing. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "neuronpipe.h"
#include "require.h"

enum { WIDTH = 256, NEURONS = 96, LAYERS = 2, EXPERTS = 5, CLUSTERS = LAYERS * EXPERTS, DEPTH = 6, FLIGHTS = DEPTH / NP_SOURCE_READS, FILE_BYTES = 700000 };
static const uint64_t OTHER = (uint64_t)1 << NP_FILE_SHIFT;
static char paths[2][64];
static int files[2];
static uint8_t contents[2][FILE_BYTES];
static uint32_t checksums[2 * CLUSTERS], words[2][CLUSTERS], arrivals;
static uint8_t *slots[2];
static uint64_t gate_offsets[LAYERS], up_offsets[LAYERS], down_offsets[LAYERS];
static const int32_t q8_0[LAYERS] = {NP_GGUF_Q8_0, NP_GGUF_Q8_0}, of_down[LAYERS] = {NP_GGUF_Q4_0, NP_GGUF_Q8_0};
static np_source_file versions[2];
static np_source source;
static np_loader_part parts[2];
static np_reader *reader;

/* Random blocks with a scale of 1. */
static void write_files(void)
{
    uint32_t random = 7;
    for (int f = 0; f < 2; f++) {
        files[f] = memfd_create("experts", 0);
        snprintf(paths[f], sizeof paths[f], "/proc/self/fd/%d", files[f]);
        for (size_t i = 0; i < FILE_BYTES; i++)
            contents[f][i] = (uint8_t)((random = random * 1664525u + 1013904223u) >> 24) & 0x3f; /* any two bytes are a small half */
        REQUIRE(pwrite(files[f], contents[f], FILE_BYTES, 0) == FILE_BYTES);
    }
}

static void note_versions(void)
{
    for (int f = 0; f < 2; f++) {
        struct stat status;
        REQUIRE(fstat(files[f], &status) == 0);
        versions[f] = (np_source_file){FILE_BYTES, (int64_t)status.st_mtim.tv_sec * 1000000000 + status.st_mtim.tv_nsec};
    }
}

static uint64_t matrix_bytes(int encoding, uint32_t rows, uint32_t columns)
{
    return EXPERTS * (uint64_t)rows * np_gguf_row_bytes(encoding, columns);
}

/* Gates in the first file; up and down in the second, up to its last byte. */
static uint32_t first_experts[LAYERS + 1];

static void describe(void)
{
    for (uint32_t layer = 0; layer <= LAYERS; layer++)
        first_experts[layer] = layer * EXPERTS;
    const uint64_t of_gate = matrix_bytes(NP_GGUF_Q8_0, NEURONS, WIDTH);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        gate_offsets[layer] = 77 + layer * of_gate;
        up_offsets[layer] = OTHER | (33 + layer * of_gate);
    }
    down_offsets[0] = 77 + 2 * of_gate;
    down_offsets[1] = OTHER | (FILE_BYTES - matrix_bytes(NP_GGUF_Q8_0, WIDTH, NEURONS));
    REQUIRE((down_offsets[1] & (OTHER - 1)) >= 33 + 2 * of_gate && down_offsets[0] + matrix_bytes(NP_GGUF_Q4_0, WIDTH, NEURONS) <= FILE_BYTES);
    const uint32_t quants = NEURONS * WIDTH, scales = NEURONS * WIDTH / 16;
    source = (np_source){
        .gate = {NP_TRIGGER, 0, quants, NEURONS, WIDTH, NP_Q8, gate_offsets, NULL, q8_0},
        .up = {NP_VALUE, 0, quants, NEURONS, WIDTH, NP_Q8, up_offsets, NULL, q8_0},
        .down = {NP_VALUE, quants + scales, 2 * quants + scales, WIDTH, NEURONS, NP_Q8, down_offsets, NULL, of_down},
        .runs = LAYERS, .first_experts = first_experts, .files = versions, .file_count = 2, .checksums = checksums,
    };
    for (int part = 0; part < 2; part++) {
        const uint32_t slot_bytes = (part ? 2 : 1) * (quants + scales);
        if (!slots[part])
            slots[part] = aligned_alloc(64, (size_t)CLUSTERS * slot_bytes);
        parts[part] = (np_loader_part){.part_bytes = 4096, .slot_bytes = slot_bytes, .slot_count = CLUSTERS, .slots = slots[part],
                                       .slots_file = -1, .words = words[part], .cluster_count = CLUSTERS};
    }
}

static const np_loader_reading reading = {.most_read_bytes = 96 << 10, .prefetch_depth = FLIGHTS, .source = &source};

static np_loader *create(const char *engine)
{
    int error = 0;
    reader = np_reader_open(paths[0], engine, DEPTH, &error);
    REQUIRE(reader && np_reader_add(reader, paths[1]) == 1);
    return np_loader_create(reader, parts, &reading, &arrivals, 64);
}

static np_loader *start(const char *engine)
{
    memset(words, 0, sizeof words);
    np_loader *loader = create(engine);
    REQUIRE(loader != NULL);
    for (int part = 0; part < 2; part++)
        for (uint32_t slot = 0; slot < CLUSTERS; slot++)
            REQUIRE_EQUAL(np_loader_grant(loader, part, &slot, 1), 1);
    return loader;
}

static np_loader_state run_dry(np_loader *loader)
{
    np_loader_state state;
    do {
        np_loader_turn(loader, 10000);
        np_loader_read_state(loader, &state);
    } while (state.in_flight);
    return state;
}

static void stop(np_loader *loader)
{
    np_loader_destroy(loader);
    np_reader_close(reader);
}

static void request_all(np_loader *loader, int wanted)
{
    for (uint32_t id = 0; id < CLUSTERS; id++)
        REQUIRE_EQUAL(np_loader_request(loader, wanted, &id, 1, 0, 0), 1);
}

static void require_rows(const np_source_matrix *matrix, uint32_t id)
{
    static uint8_t quants[NEURONS * WIDTH], scales[NEURONS * WIDTH / 16];
    const uint32_t word = words[matrix->part][id], layer = id / EXPERTS;
    REQUIRE_EQUAL(word & NP_ENTRY_STATE_MASK, NP_ENTRY_PRESENT);
    const uint64_t offset = matrix->offsets[layer], bytes = matrix_bytes(matrix->encodings[layer], matrix->rows, matrix->columns) / EXPERTS;
    const uint8_t *stored = contents[offset >> NP_FILE_SHIFT] + (offset & (OTHER - 1)) + id % EXPERTS * bytes;
    REQUIRE_EQUAL(np_unpack_gguf_rows(matrix->encodings[layer], stored, matrix->rows, matrix->columns, NP_Q8, quants, scales), NP_OK);
    const uint8_t *slot = slots[matrix->part] + (size_t)(word & NP_ENTRY_SLOT_MASK) * parts[matrix->part].slot_bytes;
    REQUIRE(memcmp(slot + matrix->quants, quants, sizeof quants) == 0 && memcmp(slot + matrix->scales, scales, sizeof scales) == 0);
}

static void test_rows_arrive_converted(const char *engine)
{
    memset(checksums, 0, sizeof checksums);
    for (int turn = 0; turn < 2; turn++) { /* at first without checksums */
        np_loader *loader = start(engine);
        request_all(loader, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE);
        const np_loader_state state = run_dry(loader);
        REQUIRE_EQUAL(state.reads, CLUSTERS * NP_SOURCE_READS);
        REQUIRE_EQUAL(state.io_errors + state.checksum_failures, 0);
        for (uint32_t id = 0; id < CLUSTERS; id++) {
            require_rows(&source.gate, id);
            require_rows(&source.up, id);
            require_rows(&source.down, id);
            REQUIRE(checksums[2 * id] && checksums[2 * id + 1]);
        }
        stop(loader);
    }
}

static void test_parts_are_read_alone(const char *engine)
{
    np_loader *loader = start(engine);
    request_all(loader, NP_REQUEST_VALUE);
    REQUIRE_EQUAL(run_dry(loader).reads, 2 * CLUSTERS);
    require_rows(&source.down, 3);
    REQUIRE_EQUAL(words[NP_TRIGGER][3], 0);
    const uint32_t ids[] = {3, 4};
    REQUIRE_EQUAL(np_loader_warm_up(loader, NP_REQUEST_TRIGGER, ids, 2, 0), NP_OK);
    REQUIRE_EQUAL(run_dry(loader).reads, 2 * CLUSTERS + 2);
    require_rows(&source.gate, 4);
    stop(loader);
}

static void test_a_later_read_must_be_as_the_first(const char *engine)
{
    checksums[2 * 7 + NP_VALUE] ^= 1;
    np_loader *loader = start(engine);
    request_all(loader, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE);
    const np_loader_state state = run_dry(loader);
    REQUIRE(state.checksum_failures == 2 && state.io_errors == 0);
    REQUIRE_EQUAL(words[NP_VALUE][7] & NP_ENTRY_STATE_MASK, NP_ENTRY_FAILED);
    require_rows(&source.gate, 7);
    require_rows(&source.down, 6);
    stop(loader);
    checksums[2 * 7 + NP_VALUE] ^= 1;
}

/* The same bytes are written again: only the time tells. */
static void test_a_changed_file_gives_nothing(const char *engine)
{
    const struct timespec later[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = versions[1].modified_ns / 1000000000 + 2}};
    const int64_t before = versions[1].modified_ns;
    REQUIRE(futimens(files[1], later) == 0);
    np_loader *loader = start(engine);
    request_all(loader, NP_REQUEST_TRIGGER);
    request_all(loader, NP_REQUEST_VALUE);
    REQUIRE_EQUAL(run_dry(loader).io_errors, 3 * CLUSTERS);
    for (uint32_t id = 0; id < CLUSTERS; id++) {
        REQUIRE_EQUAL(words[NP_VALUE][id] & NP_ENTRY_STATE_MASK, NP_ENTRY_FAILED);
        require_rows(&source.gate, id); /* the other file is as it was */
    }
    stop(loader);
    const struct timespec again[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = before / 1000000000, .tv_nsec = before % 1000000000}};
    REQUIRE(futimens(files[1], again) == 0);
}

static void test_a_shorter_file_gives_nothing(const char *engine)
{
    REQUIRE(ftruncate(files[1], FILE_BYTES - 1) == 0);
    note_versions(); /* they lie, and the read comes up short */
    np_loader *loader = start(engine);
    const uint32_t last = CLUSTERS - 1;
    REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_VALUE, &last, 1, 0, 0), 1);
    REQUIRE_EQUAL(run_dry(loader).io_errors, 3);
    REQUIRE_EQUAL(words[NP_VALUE][last] & NP_ENTRY_STATE_MASK, NP_ENTRY_FAILED);
    stop(loader);
    REQUIRE(pwrite(files[1], contents[1] + FILE_BYTES - 1, 1, FILE_BYTES - 1) == 1);
    note_versions();
}

/* Each wrong description is refused before a read. */
static void test_descriptions_are_checked(void)
{
    np_source right = source;
    const int32_t unknown[LAYERS] = {NP_GGUF_Q8_0, 99}, four[LAYERS] = {NP_GGUF_Q6_K, NP_GGUF_Q8_0};
    const uint64_t beyond[LAYERS] = {gate_offsets[0], FILE_BYTES - 5}, third[LAYERS] = {2 * OTHER, 2 * OTHER};
    const uint32_t too_many[LAYERS + 1] = {0, EXPERTS, LAYERS * EXPERTS + 1}, empty[LAYERS + 1] = {0, 0, LAYERS * EXPERTS};
    np_source wrong[10];
    for (int i = 0; i < 10; i++)
        wrong[i] = right;
    wrong[0].gate.encodings = unknown;
    wrong[1].gate.offsets = beyond;
    wrong[2].up.offsets = third;
    wrong[3].up.quants = parts[NP_VALUE].slot_bytes;
    wrong[4].down.scales = parts[NP_VALUE].slot_bytes - 1;
    wrong[5].down.part = NP_TRIGGER;
    wrong[6].first_experts = too_many;
    wrong[9].first_experts = empty;
    wrong[7].file_count = 1;
    wrong[8].down.encodings = four; /* 96 weights are no block of 256 */
    for (int i = 0; i < 10; i++) {
        source = wrong[i];
        REQUIRE(create("threads") == NULL);
        np_reader_close(reader);
    }
    source = right;
}

int main(void)
{
    static const char *const engines[] = {"threads", "io_uring"};
    write_files();
    note_versions();
    describe();
    for (int i = 0; i < 2; i++) {
        int error = 0;
        np_reader *trial = np_reader_open(paths[0], engines[i], 1, &error);
        np_reader_close(trial);
        if (!trial)
            continue; /* this system has no io_uring */
        test_rows_arrive_converted(engines[i]);
        test_parts_are_read_alone(engines[i]);
        test_a_later_read_must_be_as_the_first(engines[i]);
        test_a_changed_file_gives_nothing(engines[i]);
        test_a_shorter_file_gives_nothing(engines[i]);
    }
    test_descriptions_are_checked();
    puts("source: all passed");
    return 0;
}
