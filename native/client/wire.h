/* The wire protocol, from SPEC.md sections 3 and 4: ZMTP 3.0 over Unix sockets, messages of two frames, msgpack. */
#ifndef NEURONPIPE_WIRE_H
#define NEURONPIPE_WIRE_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* ---- one connection ----------------------------------------------------------------------------------------------- */
typedef struct {
    int fd;                /* -1: closed */
    int greeted, open;     /* the peer's greeting, and its READY, have arrived; nothing may be sent before READY */
    uint8_t *in;           /* received bytes that were not parsed yet */
    size_t have, capacity; /* bytes in `in`; its size */
    uint8_t *first;        /* the current message's first frame */
    size_t first_bytes;
    int frames;            /* frames of the current message so far */
} wire;

int wire_listen(const char *path);                                                    /* a listening descriptor, or -1 */
void wire_connect(wire *w, const char *path, const char *type, const char *identity); /* w->fd stays -1 if nobody listens */
void wire_accept(wire *w, int listening, const char *type);                           /* closes the connection to an earlier peer */
void wire_close(wire *w);
/* Read what has arrived. Returns 0 if the peer has closed the connection; then take the remaining messages and close
 * it. */
int wire_receive(wire *w);
/* The msgpack body of the next message whose first frame is the magic, valid until the next call on any connection;
 * NULL if there is none. Closes the connection if the peer violates ZMTP. */
const uint8_t *wire_next(wire *w, size_t *bytes);
/* Send a message. It is lost if the peer is gone or does not read for two seconds. */
void wire_send(wire *w, const uint8_t *map, size_t bytes);

/* ---- encoding msgpack: maps of text, numbers and maps --------------------------------------------------------------- */
typedef struct {
    uint8_t bytes[2048];
    size_t count;
} pack;
void pack_map(pack *p, unsigned entries, const char *type);         /* entries: fields besides "type", at most 14 */
void pack_text(pack *p, const char *name, const char *value);       /* cut to 255 bytes, between characters */
void pack_number(pack *p, const char *name, uint64_t value);
void pack_real(pack *p, const char *name, double value);
void pack_inner_map(pack *p, const char *name, unsigned entries);   /* the next `entries` fields belong to it */

/* ---- decoding msgpack: a message's fields, by name ------------------------------------------------------------------ */
typedef struct {
    int kind;              /* 0: missing; 'n' unsigned integer, 's' text or bytes, 'b' boolean, 'z' nil, 'a' array; '?' any other type */
    uint64_t number;       /* the integer or boolean; of an array: its length */
    const uint8_t *bytes;
    size_t count;
} value;
/* The value of a field. kind is 0 if it is missing, or the message is not one complete map. */
value unpack_field(const uint8_t *map, size_t bytes, const char *name);
int value_is(value v, const char *text);
/* Copy an array's items. Returns their count, or -1 if there are more than max_items or one is no integer in [0,
 * 2^31). */
int unpack_items(value array, int32_t *items, int max_items);
#ifdef __cplusplus
}
#endif
#endif
