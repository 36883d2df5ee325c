/* The wire, from SPEC.md sections 3 and 4: ZMTP 3.0 over Unix sockets, messages of two frames, msgpack. */
#ifndef WIRE_H
#define WIRE_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* ---- one connection ----------------------------------------------------------------------------------------------- */
typedef struct {
    int fd;                /* -1: closed */
    int greeted, open;     /* the peer's greeting, and its READY, have come: no message may be sent before that */
    uint8_t *in;           /* what was received and not taken yet */
    size_t have, capacity;
    uint8_t *first;        /* the message's first frame, once it is there */
    size_t first_bytes;
    int frames;            /* of the message that is coming in */
} wire;

int wire_listen(const char *path);                                                      /* a descriptor, or -1 */
void wire_connect(wire *w, const char *path, const char *type, const char *identity);   /* fd -1 when nobody listens */
void wire_accept(wire *w, int listening, const char *type);                             /* takes the place of an earlier peer */
void wire_close(wire *w);
/* Take what has arrived. Returns 0 when the peer is gone or breaks ZMTP. */
int wire_receive(wire *w);
/* The next message whose first frame is the magic: its msgpack, good until the next call; NULL when there is none. */
const uint8_t *wire_next(wire *w, size_t *bytes);
/* Send a message. A peer that is gone or stuck loses it. */
void wire_send(wire *w, const uint8_t *map, size_t bytes);

/* ---- msgpack, to write: maps of text, numbers and maps -------------------------------------------------------------- */
typedef struct {
    uint8_t bytes[2048];
    size_t count;
} pack;
void pack_map(pack *p, unsigned entries, const char *type);         /* entries: besides "type", 14 at most */
void pack_text(pack *p, const char *name, const char *value);       /* of a longer text the first 255 bytes */
void pack_number(pack *p, const char *name, uint64_t value);
void pack_real(pack *p, const char *name, double value);
void pack_inner_map(pack *p, const char *name, unsigned entries);   /* the next entries belong to it */

/* ---- msgpack, to read: a message's fields, by name ----------------------------------------------------------------- */
typedef struct {
    int kind;              /* 0: there is none; 'n' number, 's' text or bytes, 'b' truth, 'z' nil, 'a' array; '?' something else */
    uint64_t number;       /* of an array: its items */
    const uint8_t *bytes;
    size_t count;
} value;
/* The value of a field; kind 0 where it is missing, or the message is no map or ends too early. */
value unpack_field(const uint8_t *map, size_t bytes, const char *name);
int value_is(value v, const char *text);
/* An array's items, when there are no more than `most` and all are whole numbers from 0 to 2^31-1: their count. Else -1. */
int unpack_items(value array, int32_t *items, int most);
#ifdef __cplusplus
}
#endif
#endif
