#include "client/wire.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { GREETING_BYTES = 64, MORE = 1, LONG = 2, COMMAND = 4, MAX_FRAME_BYTES = 16 << 20, MAX_DEPTH = 16 };
static const char MAGIC[] = "NP2";

/* ---- sockets ------------------------------------------------------------------------------------------------------- */
static int address_of(struct sockaddr_un *address, const char *path)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    if (strlen(path) >= sizeof address->sun_path)
        return 0;
    strcpy(address->sun_path, path);
    return 1;
}

int wire_listen(const char *path)
{
    struct sockaddr_un address;
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    unlink(path); /* a previous incarnation may have left the socket file */
    if (fd < 0 || !address_of(&address, path) || bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 4) < 0)
        return -1;
    return fd;
}

static void send_all(wire *w, const void *bytes, size_t count)
{
    const char *at = bytes;
    while (count && w->fd >= 0) {
        const ssize_t sent = send(w->fd, at, count, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0) {
            wire_close(w);
            return;
        }
        at += sent;
        count -= (size_t)sent;
    }
}

static size_t property(uint8_t *to, const char *name, const char *text)
{
    const size_t n = strlen(name), m = strlen(text);
    to[0] = (uint8_t)n;
    memcpy(to + 1, name, n);
    memset(to + 1 + n, 0, 4);
    to[4 + n] = (uint8_t)m; /* the length is four bytes, big-endian */
    memcpy(to + 5 + n, text, m);
    return 5 + n + m;
}

/* Send the greeting and the READY command together: mechanism NULL needs no answer in between. */
static void greet(wire *w, const char *type, const char *identity)
{
    uint8_t greeting[GREETING_BYTES] = {0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0, 'N', 'U', 'L', 'L'};
    uint8_t ready[256] = {COMMAND, 0, 5, 'R', 'E', 'A', 'D', 'Y'};
    size_t end = 8;
    end += property(ready + end, "Socket-Type", type);
    end += property(ready + end, "Identity", identity);
    ready[1] = (uint8_t)(end - 2);
    send_all(w, greeting, sizeof greeting);
    send_all(w, ready, end);
}

static void begin(wire *w, int fd, const char *type, const char *identity)
{
    const struct timeval timeout = {2, 0}; /* a peer that does not read for so long is treated as gone */
    wire_close(w);
    w->fd = fd;
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    greet(w, type, identity);
}

void wire_connect(wire *w, const char *path, const char *type, const char *identity)
{
    struct sockaddr_un address;
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    if (address_of(&address, path) && connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
        begin(w, fd, type, identity);
    else
        close(fd);
}

void wire_accept(wire *w, int listening, const char *type)
{
    const int fd = accept(listening, NULL, NULL);
    if (fd >= 0)
        begin(w, fd, type, "");
}

void wire_close(wire *w)
{
    if (w->fd >= 0)
        close(w->fd);
    free(w->in);
    free(w->first);
    *w = (wire){.fd = -1};
}

int wire_receive(wire *w)
{
    for (;;) {
        if (w->capacity - w->have < 65536) {
            uint8_t *in = realloc(w->in, w->capacity + 65536 + w->capacity / 2);
            if (!in)
                abort();
            w->in = in;
            w->capacity += 65536 + w->capacity / 2;
        }
        const ssize_t received = recv(w->fd, w->in + w->have, w->capacity - w->have, MSG_DONTWAIT);
        if (received > 0) {
            w->have += (size_t)received;
            continue;
        }
        return received < 0 && (errno == EAGAIN || errno == EINTR);
    }
}

/* ---- frames -------------------------------------------------------------------------------------------------------- */
static uint64_t big_endian(const uint8_t *at, size_t bytes)
{
    uint64_t number = 0;
    while (bytes--)
        number = number << 8 | *at++;
    return number;
}

static void drop(wire *w, size_t bytes)
{
    memmove(w->in, w->in + bytes, w->have - bytes);
    w->have -= bytes;
}

static int copy_first_frame(wire *w, const uint8_t *body, size_t bytes)
{
    free(w->first);
    w->first = malloc(bytes + 1);
    if (w->first)
        memcpy(w->first, body, bytes);
    w->first_bytes = bytes;
    return w->first != NULL;
}

const uint8_t *wire_next(wire *w, size_t *bytes)
{
    static uint8_t *body; /* of the message that the last call returned */
    if (!w->greeted) {
        if (w->fd < 0 || w->have < GREETING_BYTES)
            return NULL;
        if (w->in[0] != 0xff || w->in[9] != 0x7f || w->in[10] < 3 || memcmp(w->in + 12, "NULL", 5)) {
            wire_close(w);
            return NULL;
        }
        drop(w, GREETING_BYTES);
        w->greeted = 1;
    }
    while (w->have >= 2) {
        const uint8_t flags = w->in[0];
        const size_t head = flags & LONG ? 9 : 2;
        if (w->have < head)
            return NULL;
        const uint64_t size = flags & LONG ? big_endian(w->in + 1, 8) : w->in[1];
        if (size > MAX_FRAME_BYTES) {
            wire_close(w);
            return NULL;
        }
        if (w->have < head + size)
            return NULL;
        if (flags & COMMAND && size >= 6 && !memcmp(w->in + head, "\5READY", 6))
            w->open = 1;
        const int number = flags & COMMAND ? -1 : w->frames++, last = !(flags & (MORE | COMMAND));
        int is_complete = 0;
        if (number == 0 && !copy_first_frame(w, w->in + head, size))
            abort();
        if (number == 1 && last && w->first_bytes == strlen(MAGIC) && !memcmp(w->first, MAGIC, strlen(MAGIC))) {
            free(body);
            body = malloc(size + 1);
            if (!body)
                abort();
            memcpy(body, w->in + head, size);
            *bytes = size;
            is_complete = 1;
        }
        if (last)
            w->frames = 0;
        drop(w, head + size);
        if (is_complete)
            return body;
    }
    return NULL;
}

void wire_send(wire *w, const uint8_t *map, size_t bytes)
{
    uint8_t head[16] = {MORE, sizeof MAGIC - 1};
    size_t end = 2 + sizeof MAGIC - 1;
    memcpy(head + 2, MAGIC, sizeof MAGIC - 1);
    if (!w->open)
        return;
    if (bytes < 256) {
        head[end++] = 0;
        head[end++] = (uint8_t)bytes;
    } else {
        head[end++] = LONG;
        for (int shift = 56; shift >= 0; shift -= 8)
            head[end++] = (uint8_t)((uint64_t)bytes >> shift);
    }
    send_all(w, head, end);
    send_all(w, map, bytes);
}

/* ---- msgpack ------------------------------------------------------------------------------------------------------- */
static void put(pack *p, const void *bytes, size_t count)
{
    if (count > sizeof p->bytes - p->count)
        abort(); /* this library's messages are shorter */
    memcpy(p->bytes + p->count, bytes, count);
    p->count += count;
}

static void put_text(pack *p, const char *text)
{
    size_t count = strnlen(text, 256);
    if (count > 255) /* cut between characters */
        for (count = 255; count && ((uint8_t)text[count] & 0xc0) == 0x80;)
            count--;
    const uint8_t head[2] = {0xd9, (uint8_t)count};
    put(p, head, 2);
    put(p, text, count);
}

/* A tag and the number after it, big-endian. */
static void put_tagged(pack *p, uint8_t tag, uint64_t number, int bytes)
{
    put(p, &tag, 1);
    while (bytes--) {
        const uint8_t byte = (uint8_t)(number >> 8 * bytes);
        put(p, &byte, 1);
    }
}

void pack_map(pack *p, unsigned entries, const char *type)
{
    const uint8_t head = (uint8_t)(0x80 | (entries + 1)); /* up to 15 */
    p->count = 0;
    put(p, &head, 1);
    pack_text(p, "type", type);
}

void pack_text(pack *p, const char *name, const char *text)
{
    put_text(p, name);
    put_text(p, text);
}

void pack_number(pack *p, const char *name, uint64_t number)
{
    put_text(p, name);
    put_tagged(p, 0xcf, number, 8);
}

void pack_real(pack *p, const char *name, double number)
{
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    put_text(p, name);
    put_tagged(p, 0xcb, bits, 8);
}

void pack_inner_map(pack *p, const char *name, unsigned entries)
{
    put_text(p, name);
    put_tagged(p, 0xde, entries, 2);
}

typedef struct {
    const uint8_t *at, *end;
    int broken;
} cursor;

static uint64_t take_number(cursor *c, size_t bytes)
{
    if ((size_t)(c->end - c->at) < bytes) {
        c->broken = 1;
        return 0;
    }
    c->at += bytes;
    return big_endian(c->at - bytes, bytes);
}

static value take_bytes(cursor *c, uint64_t count)
{
    if ((uint64_t)(c->end - c->at) < count) {
        c->broken = 1;
        return (value){0};
    }
    c->at += count;
    return (value){.kind = 's', .bytes = c->at - count, .count = (size_t)count};
}

static value take(cursor *c, int depth);

/* Skip the items of an array or map. kind: what the returned value gets. */
static value take_items(cursor *c, uint64_t items, int depth, int kind)
{
    value container = {.kind = kind, .number = items, .bytes = c->at};
    while (items-- && !c->broken)
        take(c, depth - 1);
    container.count = (size_t)(c->at - container.bytes);
    return container;
}

static value skip_number(cursor *c, size_t bytes)
{
    take_number(c, bytes);
    return (value){.kind = '?'};
}

/* Parse the next value. Floats, negative numbers and maps are skipped as kind '?'. */
static value take(cursor *c, int depth)
{
    const uint8_t tag = (uint8_t)take_number(c, 1);
    if (c->broken || depth <= 0) {
        c->broken = 1;
        return (value){0};
    }
    if (tag < 0x80)
        return (value){.kind = 'n', .number = tag};
    if (tag < 0x90)
        return take_items(c, 2 * (tag & 15u), depth, '?');
    if (tag < 0xa0)
        return take_items(c, tag & 15u, depth, 'a');
    if (tag < 0xc0)
        return take_bytes(c, tag & 31u);
    switch (tag) {
    case 0xc0:
        return (value){.kind = 'z'};
    case 0xc2:
    case 0xc3:
        return (value){.kind = 'b', .number = tag & 1u};
    case 0xc4:
    case 0xd9:
        return take_bytes(c, take_number(c, 1));
    case 0xc5:
    case 0xda:
        return take_bytes(c, take_number(c, 2));
    case 0xc6:
    case 0xdb:
        return take_bytes(c, take_number(c, 4));
    case 0xca:
        return skip_number(c, 4);
    case 0xcb:
        return skip_number(c, 8);
    case 0xcc:
    case 0xcd:
    case 0xce:
    case 0xcf:
        return (value){.kind = 'n', .number = take_number(c, (size_t)1 << (tag - 0xcc))};
    case 0xd0:
    case 0xd1:
    case 0xd2:
    case 0xd3:
        return skip_number(c, (size_t)1 << (tag - 0xd0));
    case 0xdc:
        return take_items(c, take_number(c, 2), depth, 'a');
    case 0xdd:
        return take_items(c, take_number(c, 4), depth, 'a');
    case 0xde:
        return take_items(c, 2 * take_number(c, 2), depth, '?');
    case 0xdf:
        return take_items(c, 2 * take_number(c, 4), depth, '?');
    default:
        if (tag < 0xe0)
            c->broken = 1; /* the protocol has no extension types */
        return (value){.kind = '?'};
    }
}

value unpack_field(const uint8_t *map, size_t bytes, const char *name)
{
    cursor c = {map, map + bytes, 0};
    const uint8_t tag = (uint8_t)take_number(&c, 1);
    uint64_t entries = tag & 15u;
    if (tag == 0xde || tag == 0xdf)
        entries = take_number(&c, tag == 0xde ? 2 : 4);
    else if (tag < 0x80 || tag >= 0x90)
        return (value){0};
    value result = {0};
    while (entries-- && !c.broken) {
        const value key = take(&c, MAX_DEPTH), content = take(&c, MAX_DEPTH);
        if (value_is(key, name))
            result = content;
    }
    return c.broken || c.at != c.end ? (value){0} : result;
}

int value_is(value v, const char *text)
{
    return v.kind == 's' && v.count == strlen(text) && !memcmp(v.bytes, text, v.count);
}

int unpack_items(value array, int32_t *items, int max_items)
{
    if (array.kind != 'a' || max_items < 0 || array.number > (uint64_t)max_items)
        return -1;
    cursor c = {array.bytes, array.bytes + array.count, 0};
    for (uint64_t n = 0; n < array.number; n++) {
        const value item = take(&c, 1);
        if (item.kind != 'n' || item.number > INT32_MAX)
            return -1;
        items[n] = (int32_t)item.number;
    }
    return (int)array.number;
}
