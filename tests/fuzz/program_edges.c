/* The C client library's parsers on arbitrary input.
 *     program_edges wire      standard input: records of 4 bytes of length (little-endian) and the bytes that one peer sends; prints each
 *                             message's type, its number `step` and the sum of its array `tokens`
 *     program_edges json      standard input: a document; prints the values at some paths */
#include "client/run_context.h"
#include "client/wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_BYTES = 1 << 20, TOKENS = 16 };

static void print_message(const uint8_t *map, size_t bytes)
{
    int32_t items[TOKENS];
    long sum = 0;
    const value type = unpack_field(map, bytes, "type"), step = unpack_field(map, bytes, "step");
    const int count = unpack_items(unpack_field(map, bytes, "tokens"), items, TOKENS);
    for (int n = 0; n < count; n++)
        sum += items[n];
    printf("%.*s %llu %d %ld\n", type.kind == 's' ? (int)type.count : 0, (const char *)type.bytes,
           step.kind == 'n' ? (unsigned long long)step.number : 0, count, sum);
}

static void receive(const uint8_t *sent, size_t bytes)
{
    int ends[2];
    wire w = {.fd = -1};
    const uint8_t *map;
    size_t count, at = 0;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
        abort();
    w.fd = ends[0];
    for (int is_open = 1; is_open && w.fd >= 0;) {
        const ssize_t sent_bytes = at < bytes ? send(ends[1], sent + at, bytes - at > 4096 ? 4096 : bytes - at, MSG_NOSIGNAL) : 0;
        at += sent_bytes > 0 ? (size_t)sent_bytes : 0;
        if (at == bytes)
            close(ends[1]);
        is_open = wire_receive(&w) && at < bytes;
        while ((map = wire_next(&w, &count)))
            print_message(map, count);
    }
    if (at < bytes)
        close(ends[1]);
    wire_close(&w);
    printf(".\n");
}

int main(int argc, char **argv)
{
    static uint8_t text[MAX_BYTES + 1];
    uint8_t head[4];
    if (argc == 2 && !strcmp(argv[1], "wire")) {
        while (fread(head, 4, 1, stdin) == 1) {
            const size_t bytes = head[0] | (size_t)head[1] << 8 | (size_t)head[2] << 16;
            uint8_t *record = malloc(bytes + 1); /* an exact allocation, so that the sanitizer detects reads behind its end */
            if (!record || bytes > MAX_BYTES || fread(record, 1, bytes, stdin) != bytes)
                return 1;
            receive(record, bytes);
            free(record);
        }
        return 0;
    }
    if (argc == 2 && !strcmp(argv[1], "json")) {
        const size_t bytes = fread(text, 1, MAX_BYTES, stdin);
        char *copy = malloc(bytes + 1);
        if (!copy)
            return 1;
        memcpy(copy, text, bytes);
        copy[bytes] = 0;
        printf("%d %d\n", json_has(copy, "a"), json_has(copy, "a/b"));
        if (json_has(copy, "a/b"))
            printf("%.6g\n", json_real(copy, "a/b"));
        for (size_t n = 0; n < 4 && json_item(copy, "list", n); n++)
            printf("%llu\n", (unsigned long long)json_number(json_item(copy, "list", n), ""));
        printf("%s\n", json_text(copy, "text"));
        return 0;
    }
    return 2;
}
