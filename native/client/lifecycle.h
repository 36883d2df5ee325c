/* A service's lifecycle, from SPEC.md section 5: connect to the coordinator, send Hello and heartbeats, notice that the
 * coordinator was restarted, and drain. Call lifecycle_tick every LIFECYCLE_TICK_MS, and lifecycle_receive when the
 * control socket is readable. */
#ifndef NEURONPIPE_LIFECYCLE_H
#define NEURONPIPE_LIFECYCLE_H
#include "client/wire.h"
#ifdef __cplusplus
extern "C" {
#endif

/* How often lifecycle_tick is due, and how often while the coordinator does not listen yet. */
enum { LIFECYCLE_TICK_MS = 250, LIFECYCLE_RETRY_MS = 20 };

typedef struct {
    wire control;
    const char *role, *numerics;    /* numerics: as in Hello; "" for a service that computes no steps */
    uint64_t index, slots;          /* slots: requests that the service works on at once */
    int available;                  /* 0: Ready is not sent before lifecycle_become_available */
    uint64_t step;                  /* sent in heartbeats, for monitors; grows with the work */
    int welcomed, draining;         /* draining: the coordinator has sent Drain; leave the main loop */
    uint64_t coordinator_pid, hello_at, beat_at, connect_at; /* times: lifecycle_now_ms */
    char path[108];
} lifecycle;

/* Initialize. run: the run's directory. Strings are not copied. Does not connect yet. */
void lifecycle_begin(lifecycle *l, const char *run, const char *role, const char *numerics, uint64_t slots, int available);
/* Connect, send Hello or send a heartbeat, whichever is due. */
void lifecycle_tick(lifecycle *l);
/* The next message that is not about the lifecycle, valid until the next call; NULL if there is none. A Reject ends the
 * process. */
const uint8_t *lifecycle_receive(lifecycle *l, size_t *bytes);
void lifecycle_become_available(lifecycle *l);
void lifecycle_send(lifecycle *l, const pack *p);
/* Begin a message with type, role and index. entries: the number of further fields. */
void lifecycle_pack(const lifecycle *l, pack *p, unsigned entries, const char *type);
/* Send Drained: the last message before the process ends. */
void lifecycle_report_drained(lifecycle *l);
uint64_t lifecycle_now_ms(void); /* monotonic clock */
#ifdef __cplusplus
}
#endif
#endif
