/* The life of a service, from SPEC.md section 5: it greets the coordinator, beats, notices that the coordinator was restarted, and drains. */
#ifndef LIFE_H
#define LIFE_H
#include "wire.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { LIFE_WAIT_MS = 250, LIFE_SOON_MS = 20 }; /* life_tick is due so often; and while nobody listens */

typedef struct {
    wire control;
    const char *role, *numerics;    /* numerics: of who computes steps, else "" */
    uint64_t index, slots;          /* slots: pieces of work that it takes at once */
    int available;                  /* 0: Ready waits for life_become_available */
    uint64_t step;                  /* for beats: a number that grows with the work */
    int welcomed, draining;         /* draining: the loop is to end */
    uint64_t coordinator_pid, hello_at, beat_at, connect_at;
    char path[108];
} life;

void life_begin(life *l, const char *run, const char *role, const char *numerics, uint64_t slots, int available);
/* Connect, greet or beat, as it is due. */
void life_tick(life *l);
/* The next message that is about work, good until the next call; NULL: none has come. */
const uint8_t *life_hear(life *l, size_t *bytes);
void life_become_available(life *l);
void life_send(life *l, const pack *p);
/* Begin a message that names its sender. entries: besides type, role and index. */
void life_pack(const life *l, pack *p, unsigned entries, const char *type);
void life_end(life *l); /* Drained */
uint64_t life_now_ms(void);
#ifdef __cplusplus
}
#endif
#endif
