/* An example loader in C: libc and the client library (native/client), written from SPEC.md. It makes one read at a
 * time, without io_uring, and prefetches only when no demand waits.
 *
 *     cc -D_GNU_SOURCE -O2 -I../../native -o loader loader.c ../../native/client/{lifecycle,run_context,sha256,wire}.c -lm
 *     neuronpipe conformance loader --use argv:./loader
 *
 * The main loop drains the workers' request rings, reads absent clusters into slots that the cache granted, verifies
 * their checksums, publishes the residency entries and wakes the waiting workers. In between it sends heartbeats and
 * handles the cache's messages. */
#include "client/lifecycle.h"
#include "client/run_context.h"
#include "client/sha256.h"
#include "client/wire.h"
#include "queue.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SLOT = 0x00ffffff, STATE = 0x03000000, ABSENT = 0, LOADING = 0x01000000, PRESENT = 0x02000000, FAILED = 0x03000000 };
enum { PINNED = 0x08000000, WORD = 0x00ffffff, GATE = 0x01000000, PREFETCH = 0x04000000, GUESS = 0x08000000, KNOWN_BITS = 0x0fffffff };
enum { LINE = 16, STOCK_MS = 50, PAGE = 4096, BATCH = 32, SPARE_SLOTS = 8 };
enum { MAX_IO_ERRORS = 3, MAX_WRONG_SUMS = 2 };
enum { BOARD_READS, BOARD_BYTES, BOARD_WRONG_SUMS, BOARD_IO_ERRORS, BOARD_DROPPED = 5 };

typedef struct {
    uint32_t *words;
    uint8_t *slots;
    size_t slot_bytes, slot_count, part_bytes, part_offset, moved_from, moved_bytes; /* moved: SPEC.md, "Co-located scales" */
    uint32_t *free_slots;
    size_t free_count, granted;
    queue demands, guesses, warm, pinned;
} part;

static part parts[2];
static size_t word_count, stride_bytes, participants, entries;
static uint32_t *heads, *tails, *requests, *asleep, *arrivals, *loaded, *sums, crc_table[256];
static const uint32_t *epoch;
static uint64_t *board;
static uint8_t *staging;
static int bundles, doorbell;
static uint64_t generation;
static lifecycle service;
static wire cache = {.fd = -1};

static void wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* ---- reading ------------------------------------------------------------------------------------------------------- */
static uint32_t crc32c(const uint8_t *bytes, size_t count)
{
    uint32_t sum = ~0u;
    for (size_t n = 0; n < count; n++)
        sum = crc_table[(sum ^ bytes[n]) & 255] ^ sum >> 8;
    return ~sum;
}

/* Verify the checksum of a part in `staging`, and copy it with its co-located scales into a slot. Returns 0 when a
 * checksum is wrong. */
static int fill(int number, uint32_t cluster, uint32_t slot)
{
    const part *p = &parts[number];
    const uint8_t *own = staging + (p->moved_bytes ? p->part_offset : 0);
    uint8_t *to = p->slots + slot * p->slot_bytes, *end = to + p->slot_bytes - p->moved_bytes;
    for (int n = p->moved_bytes ? 0 : number; n <= number; n++)
        if (crc32c(n == number ? own : staging, parts[n].part_bytes) != sums[2 * cluster + (uint32_t)n])
            return 0;
    memcpy(to, own, (size_t)(end - to));
    memcpy(end, staging + p->moved_from, p->moved_bytes);
    return 1;
}

/* Read one part of a cluster into a slot, unless it is present, or has failed in this epoch. Returns 0 when no slot is
 * free. */
static int load(int number, uint32_t cluster, uint32_t flags)
{
    part *p = &parts[number];
    uint32_t *word = &p->words[cluster], value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if ((value & STATE) == FAILED && (value & SLOT) != (__atomic_load_n(epoch, __ATOMIC_ACQUIRE) & SLOT))
        if (__atomic_compare_exchange_n(word, &value, ABSENT, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            value = ABSENT;
    if ((value & STATE) != ABSENT)
        return 1;
    if (!p->free_count)
        return 0;
    const uint32_t slot = p->free_slots[--p->free_count];
    __atomic_store_n(word, LOADING | slot, __ATOMIC_RELEASE);
    const size_t before = p->moved_bytes ? 0 : p->part_offset, bytes = p->part_offset + p->part_bytes - before;
    const off_t place = (off_t)(cluster * stride_bytes + before);
    for (int io_errors = 0, wrong_sums = 0;;) {
        if (pread(bundles, staging, bytes, place) != (ssize_t)bytes) {
            __atomic_add_fetch(&board[BOARD_IO_ERRORS], 1, __ATOMIC_RELAXED);
            io_errors++;
        } else {
            __atomic_add_fetch(&board[BOARD_READS], 1, __ATOMIC_RELAXED);
            __atomic_add_fetch(&board[BOARD_BYTES], bytes, __ATOMIC_RELAXED);
            if (fill(number, cluster, slot)) {
                __atomic_store_n(word, PRESENT | slot | flags, __ATOMIC_RELEASE);
                return 1;
            }
            __atomic_add_fetch(&board[BOARD_WRONG_SUMS], 1, __ATOMIC_RELAXED);
            wrong_sums++;
        }
        if (io_errors == MAX_IO_ERRORS || wrong_sums == MAX_WRONG_SUMS) {
            p->free_slots[p->free_count++] = slot;
            __atomic_store_n(word, FAILED | (__atomic_load_n(epoch, __ATOMIC_ACQUIRE) & SLOT), __ATOMIC_RELEASE);
            return 1;
        }
    }
}

/* Queue the requests in the workers' rings. Returns 1 if there were any. */
static int queue_requests(void)
{
    int any = 0;
    for (size_t m = 0; m < participants; m++) {
        const uint32_t tail = __atomic_load_n(&tails[m * LINE], __ATOMIC_SEQ_CST);
        uint32_t head = __atomic_load_n(&heads[m * LINE], __ATOMIC_RELAXED);
        if (tail == head)
            continue;
        const int was_full = tail - head >= entries;
        if (tail - head > entries)
            head = tail; /* no correct worker does this: drop all */
        for (; head != tail; head++) {
            const uint32_t entry = requests[m * entries + head % entries], cluster = entry & WORD;
            if (cluster >= word_count || entry & ~(uint32_t)KNOWN_BITS || !(entry & (GATE | GATE << 1))) {
                __atomic_add_fetch(&board[BOARD_DROPPED], 1, __ATOMIC_RELAXED);
                continue;
            }
            for (uint32_t number = 0; number < 2; number++)
                if (entry & GATE << number)
                    queue_put(entry & (PREFETCH | GUESS) ? &parts[number].guesses : &parts[number].demands, cluster);
        }
        __atomic_store_n(&heads[m * LINE], head, __ATOMIC_RELEASE);
        if (was_full)
            wake(&heads[m * LINE]);
        any = 1;
    }
    return any;
}

/* Read up to BATCH demands; without demands, one other cluster if slots are to spare. Returns the number read. */
static int read_some(void)
{
    int done = 0;
    for (int number = 0; number < 2; number++)
        for (queue *q = &parts[number].demands; q->count && done < BATCH && load(number, q->clusters[q->from], 0); done++)
            queue_take(q); /* the remaining demands wait for a grant */
    for (int number = 0; number < 2 && !done; number++) {
        part *p = &parts[number];
        const size_t spare = p->slot_count < word_count ? SPARE_SLOTS : 0;
        queue *q = p->guesses.count ? &p->guesses : p->pinned.count ? &p->pinned : &p->warm;
        if (q->count && p->free_count > spare)
            done += load(number, queue_take(q), q == &p->pinned ? PINNED : 0);
    }
    if (done) {
        __atomic_add_fetch(arrivals, 1, __ATOMIC_ACQ_REL);
        wake(arrivals);
    }
    return done;
}

/* ---- the cache ----------------------------------------------------------------------------------------------------- */
static void send_slot_counts(int idle)
{
    static uint64_t sent[7], sent_at;
    static int sent_fd = -1;
    const uint64_t figures[7] = {generation,       parts[0].free_count, parts[1].free_count, parts[0].demands.count, parts[1].demands.count,
                                 parts[0].granted, parts[1].granted};
    if (!cache.open)
        return;
    int due = sent_fd != cache.fd || (!generation && lifecycle_now_ms() - sent_at >= STOCK_MS) || (idle && memcmp(sent, figures, sizeof sent));
    for (int n = 1; n <= 2; n++)
        due |= 4 * figures[n] < 3 * sent[n] || (figures[n + 2] && !sent[n + 2]);
    if (!due)
        return;
    pack p;
    pack_map(&p, 7, "SlotCounts");
    static const char *const names[] = {"generation", "trigger_free", "value_free", "trigger_waiting", "value_waiting", "trigger_granted", "value_granted"};
    for (int n = 0; n < 7; n++)
        pack_number(&p, names[n], figures[n]);
    memcpy(sent, figures, sizeof sent);
    sent_at = lifecycle_now_ms();
    sent_fd = cache.fd;
    wire_send(&cache, p.bytes, p.count);
}

static void answer(const char *type)
{
    pack p;
    pack_map(&p, 1, type);
    pack_number(&p, "generation", generation);
    wire_send(&cache, p.bytes, p.count);
}

static void reset(uint64_t to)
{
    generation = to;
    for (int number = 0; number < 2; number++) {
        parts[number].free_count = parts[number].granted = 0;
        queue *const forgotten[] = {&parts[number].guesses, &parts[number].warm, &parts[number].pinned};
        for (int n = 0; n < 3; n++)
            queue_empty(forgotten[n]);
    }
    answer("ResetDone");
    lifecycle_become_available(&service);
}

static uint32_t item_at(value list, size_t n)
{
    return list.bytes[4 * n] | (uint32_t)list.bytes[4 * n + 1] << 8 | (uint32_t)list.bytes[4 * n + 2] << 16 | (uint32_t)list.bytes[4 * n + 3] << 24;
}

/* Return the memory of unused slots from `first` on to the system, whole pages only. */
static void trim(const part *p, value slots)
{
    const uint64_t first = slots.kind == 'n' ? slots.number : p->slot_count;
    const uintptr_t end = (uintptr_t)p->slots + p->slot_count * p->slot_bytes, begin = (uintptr_t)p->slots + first * p->slot_bytes + PAGE - 1;
    if (first < p->slot_count && begin / PAGE < end / PAGE)
        madvise((void *)(begin / PAGE * PAGE), (end / PAGE - begin / PAGE) * PAGE, MADV_REMOVE);
}

static void from_cache(const uint8_t *map, size_t bytes)
{
    const value type = unpack_field(map, bytes, "type"), number = unpack_field(map, bytes, "generation");
    if (number.kind != 'n')
        return;
    if (value_is(type, "Reset")) {
        if (number.number > generation)
            reset(number.number);
    } else if (number.number != generation) {
        return; /* a message of an earlier generation */
    } else if (value_is(type, "Grant")) {
        const value which = unpack_field(map, bytes, "part"), slots = unpack_field(map, bytes, "slots");
        if (which.kind != 'n' || which.number > 1 || slots.kind != 's' || slots.count % 4)
            return;
        part *p = &parts[which.number];
        for (size_t n = 0; n < slots.count / 4 && p->free_count < p->slot_count; n++)
            if (item_at(slots, n) < p->slot_count)
                p->free_slots[p->free_count++] = item_at(slots, n);
        p->granted += slots.count / 4;
    } else if (value_is(type, "Trim")) {
        trim(&parts[0], unpack_field(map, bytes, "trigger_slots"));
        trim(&parts[1], unpack_field(map, bytes, "value_slots"));
        answer("Trimmed");
    } else if (value_is(type, "Warm")) {
        const value which = unpack_field(map, bytes, "parts"), clusters = unpack_field(map, bytes, "clusters");
        const int pinned = unpack_field(map, bytes, "pinned").number == 1;
        if (which.kind != 'n' || clusters.kind != 's' || clusters.count % 4)
            return;
        for (size_t n = 0; n < clusters.count / 4; n++)
            for (int number = 0; number < 2; number++)
                if (which.number & (1u << number) && item_at(clusters, n) < word_count)
                    queue_put(pinned ? &parts[number].pinned : &parts[number].warm, item_at(clusters, n));
    }
}

/* ---- start ---------------------------------------------------------------------------------------------------------- */
static void verify(const char *manifest, const char *name, const void *bytes, size_t count)
{
    char path[128], sum[65];
    snprintf(path, sizeof path, "files/%s/sha256", name);
    sha256_text(bytes, count, sum);
    if (strcmp(sum, json_text(manifest, path)))
        run_fail(name, "does not match the manifest's sha256; convert the model again");
}

/* If the segment has checksums for the embedding's rows, the embedding stays on flash: store them, and return the range
 * of its quants in the file. Else the range is empty. */
static size_t left_on_flash(const segment *fixed, const char *file, size_t bytes, size_t *end)
{
    size_t shape[2], header_bytes = 0;
    uint32_t *row_sums = segment_field(fixed, "embedding_checksums", shape);
    *end = bytes;
    if (!shape[0])
        return bytes;
    memcpy(&header_bytes, file, 8);
    char *header = strndup(file + 8, header_bytes);
    const size_t tensors = 8 + header_bytes, from = tensors + (size_t)json_number(json_item(header, "embedding.quants/data_offsets", 0), "");
    *end = tensors + (size_t)json_number(json_item(header, "embedding.quants/data_offsets", 1), "");
    free(header);
    const size_t row_bytes = (*end - from) / shape[0];
    for (size_t row = 0; row < shape[0]; row++)
        row_sums[row] = crc32c((const uint8_t *)file + from + row * row_bytes, row_bytes);
    return from;
}

static void copy_verified(const char *package, const char *manifest, const char *name, const segment *fixed, const char *field)
{
    size_t shape[2], bytes, end;
    uint8_t *to = segment_field(fixed, field, shape);
    if (!shape[0])
        return;
    char *file = run_read_file(package, name, &bytes);
    verify(manifest, name, file, bytes);
    if (bytes != shape[0])
        run_fail(name, "has another size than its place in shared memory");
    const size_t from = strcmp(field, "file") ? (end = bytes) : left_on_flash(fixed, file, bytes, &end);
    memcpy(to, file, from);
    memcpy(to + end, file + end, bytes - end);
    free(file);
}

static void load_fixed(const char *run_file, const char *package, const char *manifest)
{
    segment fixed = segment_open(run_file, "fixed", 0);
    if (!segment_is_sealed(&fixed)) { /* otherwise an earlier loader has filled it */
        segment_close(&fixed);
        fixed = segment_open(run_file, "fixed", 1);
        copy_verified(package, manifest, "fixed.safetensors", &fixed, "file");
        copy_verified(package, manifest, "predictor.safetensors", &fixed, "predictor");
        segment_close(&fixed);
        segment_seal(&fixed);
    } else {
        segment_close(&fixed);
    }
    close(fixed.fd);
    __atomic_store_n(loaded, 1, __ATOMIC_RELEASE);
    wake(loaded);
}

static void open_part(int number, const segment *slots, const segment *residency, const char *manifest, const char *plan)
{
    part *p = &parts[number];
    size_t shape[2];
    p->slots = segment_field(slots, number ? "value_slots" : "trigger_slots", shape);
    p->slot_count = shape[0];
    p->slot_bytes = shape[1];
    p->words = segment_field(residency, number ? "value_entries" : "trigger_entries", shape);
    word_count = shape[0];
    p->part_bytes = json_number(manifest, number ? "layout/value_part_bytes" : "layout/trigger_part_bytes");
    p->part_offset = number ? parts[0].part_bytes : 0;
    p->moved_from = number ? json_number(plan, "memory/moved_scales_from") : 0;
    p->moved_bytes = number ? json_number(plan, "memory/moved_scales_bytes") : 0;
    p->free_slots = calloc(p->slot_count + 1, sizeof *p->free_slots);
    if (!p->free_slots || p->slot_bytes < p->moved_bytes || p->part_bytes < p->slot_bytes - p->moved_bytes ||
        p->moved_from > parts[0].part_bytes || p->moved_bytes > parts[0].part_bytes - p->moved_from)
        run_fail("loader", "the slots do not suit the package");
    queue *const queues[] = {&p->demands, &p->guesses, &p->warm, &p->pinned};
    for (int n = 0; n < 4; n++)
        queue_create(queues[n], word_count);
    for (size_t n = 0; n < word_count; n++) /* reads of an earlier loader */
        if ((__atomic_load_n(&p->words[n], __ATOMIC_ACQUIRE) & STATE) == LOADING)
            __atomic_store_n(&p->words[n], ABSENT, __ATOMIC_RELEASE);
}

static void open_all(const char *run, const char *package)
{
    char path[4096];
    size_t shape[2], bytes;
    const char *run_file = run_read_file(run, "run.json", NULL), *manifest = run_read_file(package, "manifest.json", NULL);
    const char *plan = run_read_file(run, "plan.json", NULL);
    const segment residency = segment_open(run_file, "residency", 1), slots = segment_open(run_file, "slots", 1);
    const segment exchange = segment_open(run_file, "exchange", 0), boards = segment_open(run_file, "board", 1);
    for (uint32_t n = 0; n < 256; n++) {
        crc_table[n] = n;
        for (int bit = 0; bit < 8; bit++)
            crc_table[n] = crc_table[n] >> 1 ^ (crc_table[n] & 1 ? 0x82f63b78u : 0);
    }
    epoch = segment_field(&exchange, "epoch", NULL);
    board = segment_field(&boards, "flash", NULL);
    arrivals = segment_field(&residency, "arrivals", NULL);
    loaded = segment_field(&residency, "loaded", NULL);
    asleep = segment_field(&residency, "asleep", NULL);
    tails = segment_field(&residency, "request_tails", NULL);
    heads = segment_field(&residency, "request_heads", NULL);
    requests = segment_field(&residency, "requests", shape);
    participants = shape[0];
    entries = shape[1];
    open_part(0, &slots, &residency, manifest, plan);
    open_part(1, &slots, &residency, manifest, plan);
    stride_bytes = parts[0].part_bytes + parts[1].part_bytes;
    sums = (uint32_t *)run_read_file(package, "checksums.bin", &bytes);
    verify(manifest, "checksums.bin", sums, bytes);
    snprintf(path, sizeof path, "%s/bundles.bin", package);
    bundles = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (bundles < 0)
        bundles = open(path, O_RDONLY | O_CLOEXEC); /* a file system without direct reads */
    if (bundles < 0 || posix_memalign((void **)&staging, PAGE, stride_bytes))
        run_fail(path, strerror(errno));
    snprintf(path, sizeof path, "%s/doorbell", run);
    doorbell = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    load_fixed(run_file, package, manifest);
}

/* ---- the loop ------------------------------------------------------------------------------------------------------- */
static void receive_messages(int listening)
{
    struct pollfd ready = {listening, POLLIN, 0};
    size_t bytes;
    const uint8_t *map;
    if (poll(&ready, 1, 0) > 0)
        wire_accept(&cache, listening, "ROUTER");
    service.step = board[BOARD_READS];
    while (lifecycle_receive(&service, &bytes))
        ; /* a loader's work comes from the cache and the rings */
    if (cache.fd >= 0 && !wire_receive(&cache))
        wire_close(&cache);
    while ((map = wire_next(&cache, &bytes)))
        from_cache(map, bytes);
}

static void sleep_until_needed(int listening)
{
    char bells[64];
    struct pollfd sources[] = {{doorbell, POLLIN, 0}, {listening, POLLIN, 0}, {service.control.fd, POLLIN, 0}, {cache.fd, POLLIN, 0}};
    __atomic_store_n(asleep, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!queue_requests())
        poll(sources, 4, service.control.fd < 0 || !generation ? STOCK_MS : LIFECYCLE_TICK_MS);
    __atomic_store_n(asleep, 0, __ATOMIC_SEQ_CST);
    while (read(doorbell, bells, sizeof bells) > 0)
        ;
}

int main(void)
{
    char cache_path[4096];
    const char *run = run_environment("RUN");
    open_all(run, run_environment("PACKAGE"));
    lifecycle_begin(&service, run, "loader", "", 0, 0);
    snprintf(cache_path, sizeof cache_path, "%s/cache", run);
    const int listening = wire_listen(cache_path);
    if (listening < 0 || doorbell < 0)
        run_fail(cache_path, strerror(errno));
    while (!service.draining) {
        lifecycle_tick(&service);
        receive_messages(listening);
        queue_requests();
        const int busy = generation && read_some();
        send_slot_counts(!busy);
        if (!busy && !service.draining)
            sleep_until_needed(listening);
    }
    lifecycle_report_drained(&service);
    return 0;
}
