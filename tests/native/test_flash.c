/* The flash reader's engines over a small file, and CRC-32C. */
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "flash/crc32c.h"
#include "flash/reader.h"
#include "neuronpipe.h"
#include "require.h"
#include "sync/clock.h"

enum { PAGE = 4096, PAGES = 64, TAIL = 1000, FILE_BYTES = PAGES * PAGE + TAIL, DEPTH = 8 };
static char path[64]; /* of an unlinked file, which disappears with the test */
static uint8_t contents[FILE_BYTES];
static uint8_t *buffer; /* page-aligned, as long as the file rounded up */

static np_reader *open_reader(const char *engine, uint32_t depth)
{
    int error = -1;
    np_reader *reader = np_reader_open(path, engine, depth, &error);
    REQUIRE_EQUAL(error, 0);
    REQUIRE(reader && strcmp(np_reader_engine(reader), engine) == 0);
    memset(buffer, 0xee, FILE_BYTES + PAGE);
    return reader;
}

/* Read once and wait; return the completion's result. */
static int32_t read_one(np_reader *reader, uint64_t offset, uint32_t bytes, void *target)
{
    const uint64_t tag = offset ^ 0x5555;
    REQUIRE_EQUAL(np_reader_submit(reader, &offset, &bytes, &target, &tag, 1), 1);
    np_completion done = {0};
    REQUIRE_EQUAL(np_reader_reap(reader, &done, 1, 4, 10000), 1);
    REQUIRE(done.tag == tag);
    return done.result;
}

static void test_reads_of_every_size(const char *engine)
{
    np_reader *reader = open_reader(engine, DEPTH);
    for (uint32_t pages = 1; pages <= PAGES; pages = pages * 2 + 1)
        for (uint32_t first = 0; first + pages <= PAGES; first += 7) {
            memset(buffer, 0xee, pages * PAGE);
            REQUIRE_EQUAL(read_one(reader, (uint64_t)first * PAGE, pages * PAGE, buffer), pages * PAGE);
            REQUIRE(memcmp(buffer, contents + (size_t)first * PAGE, pages * PAGE) == 0);
        }
    np_reader_close(reader);
}

static void test_many_at_once(const char *engine)
{
    np_reader *reader = open_reader(engine, DEPTH);
    uint64_t offsets[PAGES], tags[PAGES];
    uint32_t bytes[PAGES], seen[PAGES] = {0};
    void *targets[PAGES];
    for (uint32_t i = 0; i < PAGES; i++) {
        tags[i] = i * 37 % PAGES;
        offsets[i] = tags[i] * PAGE;
        bytes[i] = PAGE;
        targets[i] = buffer + offsets[i];
    }
    size_t submitted = 0, done = 0;
    while (done < PAGES) {
        const int taken = np_reader_submit(reader, offsets + submitted, bytes + submitted, targets + submitted, tags + submitted,
                                           PAGES - submitted);
        REQUIRE(taken >= 0 && taken <= DEPTH); /* only as many as fit */
        submitted += (size_t)taken;
        REQUIRE(np_reader_in_flight(reader) <= DEPTH);
        np_completion out[3];
        const int count = np_reader_reap(reader, out, 1, 3, 10000);
        REQUIRE(count >= 1 && count <= 3);
        for (int i = 0; i < count; i++) {
            REQUIRE_EQUAL(out[i].result, PAGE);
            REQUIRE_EQUAL(seen[out[i].tag]++, 0);
        }
        done += (size_t)count;
    }
    REQUIRE_EQUAL(np_reader_in_flight(reader), 0);
    REQUIRE(memcmp(buffer, contents, PAGES * PAGE) == 0);
    np_reader_close(reader);
}

static void test_full_queue_takes_the_first(const char *engine)
{
    np_reader *reader = open_reader(engine, 2);
    const uint64_t offsets[] = {0, PAGE, 2 * PAGE}, tags[] = {1, 2, 3};
    const uint32_t bytes[] = {PAGE, PAGE, PAGE};
    void *const targets[] = {buffer, buffer + PAGE, buffer + 2 * PAGE};
    REQUIRE_EQUAL(np_reader_submit(reader, offsets, bytes, targets, tags, 3), 2);
    REQUIRE_EQUAL(np_reader_submit(reader, offsets, bytes, targets, tags, 1), 0);
    np_completion out[4];
    REQUIRE_EQUAL(np_reader_reap(reader, out, 4, 4, -1), 2); /* does not wait for completions that cannot come */
    REQUIRE_EQUAL(out[0].tag + out[1].tag, 3);
    REQUIRE_EQUAL(np_reader_reap(reader, out, 1, 4, -1), 0);
    np_reader_close(reader);
}

static void test_reads_end_with_the_file(const char *engine)
{
    np_reader *reader = open_reader(engine, DEPTH);
    REQUIRE_EQUAL(read_one(reader, PAGES * PAGE, PAGE, buffer), TAIL);                    /* a piece of a page */
    REQUIRE_EQUAL(read_one(reader, (PAGES - 1) * PAGE, 2 * PAGE, buffer), PAGE + TAIL);   /* a page and a piece */
    REQUIRE(memcmp(buffer, contents + (PAGES - 1) * PAGE, PAGE + TAIL) == 0);
    REQUIRE_EQUAL(read_one(reader, (PAGES + 9) * PAGE, PAGE, buffer), 0);                 /* no bytes */
    REQUIRE_EQUAL(read_one(reader, (PAGES - 1) * PAGE, PAGE, buffer), PAGE);         /* the reader still works */
    np_reader_close(reader);
}

static void test_reads_of_several_files(const char *engine)
{
    char other[64];
    const int file = memfd_create("other", 0);
    REQUIRE(file >= 0 && write(file, "another file", 12) == 12);
    snprintf(other, sizeof other, "/proc/self/fd/%d", file);
    np_reader *reader = open_reader(engine, DEPTH);
    REQUIRE_EQUAL(np_reader_add(reader, "/no/such/file"), -ENOENT);
    REQUIRE_EQUAL(np_reader_add(reader, other), 1);
    REQUIRE_EQUAL(read_one(reader, (uint64_t)1 << NP_FILE_SHIFT, PAGE, buffer), 12);
    REQUIRE(memcmp(buffer, "another file", 12) == 0);
    REQUIRE_EQUAL(read_one(reader, PAGE, PAGE, buffer), PAGE);
    REQUIRE(memcmp(buffer, contents + PAGE, PAGE) == 0);
    const uint64_t offset = (uint64_t)2 << NP_FILE_SHIFT, tag = 1;
    const uint32_t bytes = PAGE;
    void *const target = buffer;
    REQUIRE_EQUAL(np_reader_submit(reader, &offset, &bytes, &target, &tag, 1), NP_E_ARGUMENT); /* no third file */
    np_reader_close(reader);
    close(file);
}

static void test_misaligned_and_empty_reads_are_refused(const char *engine)
{
    np_reader *reader = open_reader(engine, DEPTH);
    const uint32_t alignment = np_reader_alignment(reader);
    REQUIRE_EQUAL(np_reader_direct(reader), alignment > 1);
    const struct {
        uint64_t offset;
        uint32_t bytes;
        void *target;
        int always;
    } bad[] = {{1, PAGE, buffer, 0}, {0, PAGE - 1, buffer, 0}, {0, PAGE, buffer + 1, 0}, {0, 0, buffer, 1},
               {0, PAGE, NULL, 1},   {UINT64_MAX - PAGE + 1, PAGE, buffer, 1}};
    const uint64_t tag = 0;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (alignment > 1 || bad[i].always)
            REQUIRE_EQUAL(np_reader_submit(reader, &bad[i].offset, &bad[i].bytes, &bad[i].target, &tag, 1), NP_E_ARGUMENT);
    REQUIRE_EQUAL(np_reader_in_flight(reader), 0);
    np_reader_close(reader);
}

static void test_event_and_time_limit(const char *engine)
{
    np_reader *reader = open_reader(engine, DEPTH);
    np_completion out[DEPTH];
    const int event = np_reader_event_fd(reader);
    REQUIRE(event >= 0);
    REQUIRE_EQUAL(np_reader_event_fd(reader), event);
    struct pollfd ready = {.fd = event, .events = POLLIN};
    for (int round = 0; round < 50; round++) {
        uint64_t count;
        while (read(event, &count, sizeof count) > 0)
            continue;
        REQUIRE_EQUAL(poll(&ready, 1, 0), 0);
        const uint64_t offset = 0, tag = 9;
        const uint32_t bytes = PAGE;
        void *target = buffer;
        REQUIRE_EQUAL(np_reader_submit(reader, &offset, &bytes, &target, &tag, 1), 1);
        REQUIRE_EQUAL(poll(&ready, 1, 10000), 1);
        REQUIRE_EQUAL(np_reader_reap(reader, out, 0, DEPTH, 0), 1);
    }
    REQUIRE_EQUAL(np_reader_reap(reader, out, 1, DEPTH, 10), 0);
    np_reader_close(reader);
}

static void test_close_waits_for_reads_in_flight(const char *engine)
{
    np_reader *reader = open_reader(engine, DEPTH);
    const uint64_t offset = 0, tag = 1;
    const uint32_t bytes = PAGES * PAGE;
    void *target = buffer;
    REQUIRE_EQUAL(np_reader_submit(reader, &offset, &bytes, &target, &tag, 1), 1);
    np_reader_close(reader);
    REQUIRE(memcmp(buffer, contents, PAGES * PAGE) == 0);
}

static void test_opening_says_what_is_wrong(void)
{
    int error = 0;
    REQUIRE(!np_reader_open("there-is-no-such-file", NULL, DEPTH, &error));
    REQUIRE_EQUAL(error, ENOENT);
    REQUIRE(!np_reader_open(".", NULL, DEPTH, &error));
    REQUIRE_EQUAL(error, EISDIR);
    REQUIRE(!np_reader_open(path, "telepathy", DEPTH, &error));
    REQUIRE_EQUAL(error, EINVAL);
    REQUIRE(!np_reader_open(path, NULL, 0, &error));
    REQUIRE_EQUAL(error, EINVAL);
    np_reader_close(NULL);
}

/* If io_uring is forbidden, by an errno or (Android) by a deadly signal, the thread pool takes over. */
static void test_forbidden_io_uring(uint32_t verdict)
{
    const pid_t child = fork();
    if (child == 0) {
        struct sock_filter rules[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, verdict),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        const struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
            _exit(77); /* an emulator without seccomp */
        int error = 0;
        REQUIRE(!np_reader_open(path, "io_uring", DEPTH, &error));
        REQUIRE_EQUAL(error, EPERM);
        np_reader *reader = np_reader_open(path, NULL, DEPTH, &error);
        REQUIRE(reader && strcmp(np_reader_engine(reader), "threads") == 0);
        REQUIRE_EQUAL(read_one(reader, 0, PAGE, buffer), PAGE);
        np_reader_close(reader);
        _exit(0);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77));
    if (WEXITSTATUS(status) == 77)
        printf("  a filter that forbids io_uring: not tested\n");
}

static void test_crc32c(void)
{
    REQUIRE_EQUAL(np_crc32c(0, "123456789", 9), 0xe3069283u); /* the check value of the algorithm's catalogue */
    REQUIRE_EQUAL(np_crc32c(0, contents, 0), 0);
    uint8_t zeros[32] = {0};
    REQUIRE_EQUAL(np_crc32c(0, zeros, 32), 0x8a9136aau); /* RFC 3720, B.4 */
    for (size_t start = 0; start < 9; start++)
        for (size_t bytes = 0; bytes < 13000; bytes = bytes < 40 ? bytes + 1 : bytes * 9 / 8) {
            const uint32_t expected = np_crc32c_by_table(0, contents + start, bytes);
            REQUIRE_EQUAL(np_crc32c(0, contents + start, bytes), expected);
            if (np_crc32c_has_instruction())
                REQUIRE_EQUAL(np_crc32c_by_instruction(0, contents + start, bytes), expected);
            const size_t cut = bytes / 3; /* continued */
            REQUIRE_EQUAL(np_crc32c(np_crc32c(0, contents + start, cut), contents + start + cut, bytes - cut), expected);
        }
}

static void write_file(void)
{
    uint32_t random = 1;
    for (size_t i = 0; i < FILE_BYTES; i++)
        contents[i] = (uint8_t)((random = random * 1664525u + 1013904223u) >> 24);
    const char *folder = getenv("TMPDIR");
    char name[4096];
    snprintf(name, sizeof name, "%s/flash-XXXXXX", folder ? folder : "/tmp");
    const int file = mkstemp(name);
    REQUIRE(file >= 0);
    unlink(name);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    REQUIRE(write(file, contents, FILE_BYTES) == FILE_BYTES);
    REQUIRE(fsync(file) == 0);
}

/* Rows of every place in a block, the last ones of the file, rows behind its end, and a changed checksum. */
static void test_rows_of_a_matrix(void)
{
    enum { OFFSET = 72, ROW_BYTES = 1700, ROWS = (FILE_BYTES - OFFSET) / ROW_BYTES };
    static uint32_t checksums[ROWS + 1];
    int error = 0;
    np_row_checksums(contents + OFFSET, ROW_BYTES, ROWS, checksums);
    np_row_file *rows = np_row_file_open(path, OFFSET, ROW_BYTES, ROWS + 1, checksums, &error);
    REQUIRE(rows);
    for (uint32_t row = 0; row < ROWS; row++) {
        const uint8_t *bytes = np_row_file_read(rows, row * 31 % ROWS);
        REQUIRE(bytes && memcmp(bytes, contents + OFFSET + (size_t)(row * 31 % ROWS) * ROW_BYTES, ROW_BYTES) == 0);
    }
    REQUIRE(!np_row_file_read(rows, ROWS));     /* the file ends within it */
    REQUIRE(!np_row_file_read(rows, ROWS + 1)); /* no row of the matrix */
    checksums[3]++;
    REQUIRE(!np_row_file_read(rows, 3));
    const uint8_t *fourth = np_row_file_read(rows, 4);
    REQUIRE(fourth);
    checksums[4]++;
    for (uint32_t row = 5; row < 8; row++)
        REQUIRE(np_row_file_read(rows, 4) == fourth && np_row_file_read(rows, row) != fourth); /* the last four are kept */
    REQUIRE(np_row_file_read(rows, 8) && !np_row_file_read(rows, 4));
    np_row_file_close(rows);
    np_row_file_close(NULL);
    REQUIRE(!np_row_file_open("/nowhere/at/all", 0, ROW_BYTES, ROWS, checksums, &error));
    REQUIRE_EQUAL(error, ENOENT);
    REQUIRE(!np_row_file_open(path, 0, 0, ROWS, checksums, &error));
    REQUIRE_EQUAL(error, EINVAL);
}

int main(void)
{
    static const char *const engines[] = {"io_uring", "threads"};
    setvbuf(stdout, NULL, _IONBF, 0);
    write_file();
    buffer = aligned_alloc(PAGE, (PAGES + 2) * PAGE);
    for (size_t i = 0; i < 2; i++) {
        int error = 0;
        np_reader *reader = np_reader_open(path, engines[i], DEPTH, &error);
        if (!reader && i == 0) {
            printf("  io_uring, which is not allowed here (%s): not tested\n", strerror(error));
            continue;
        }
        printf("  %s: %s\n", engines[i], np_reader_direct(reader) ? "direct I/O" : "through the page cache");
        np_reader_close(reader);
        test_reads_of_every_size(engines[i]);
        test_many_at_once(engines[i]);
        test_full_queue_takes_the_first(engines[i]);
        test_reads_end_with_the_file(engines[i]);
        test_reads_of_several_files(engines[i]);
        test_misaligned_and_empty_reads_are_refused(engines[i]);
        test_event_and_time_limit(engines[i]);
        test_close_waits_for_reads_in_flight(engines[i]);
    }
    test_opening_says_what_is_wrong();
    test_forbidden_io_uring(SECCOMP_RET_ERRNO | EPERM);
    test_forbidden_io_uring(SECCOMP_RET_TRAP);
    test_crc32c();
    test_rows_of_a_matrix();
    free(buffer);
    printf("flash: all passed\n");
    return 0;
}
