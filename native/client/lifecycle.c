#include "client/lifecycle.h"

#include "client/run_context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { HELLO_MS = 1000 };

uint64_t lifecycle_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

void lifecycle_begin(lifecycle *l, const char *run, const char *role, const char *numerics, uint64_t slots, int available)
{
    *l = (lifecycle){.control = {.fd = -1}, .role = role, .numerics = numerics, .slots = slots, .available = available};
    l->index = strtoull(run_environment("INDEX"), NULL, 10);
    if ((size_t)snprintf(l->path, sizeof l->path, "%s/control", run) >= sizeof l->path)
        run_fail(run, "the run's directory has too long a name");
}

void lifecycle_send(lifecycle *l, const pack *p)
{
    wire_send(&l->control, p->bytes, p->count);
}

void lifecycle_pack(const lifecycle *l, pack *p, unsigned entries, const char *type)
{
    pack_map(p, entries + 2, type);
    pack_text(p, "role", l->role);
    pack_number(p, "index", l->index);
}

static void send_hello(lifecycle *l)
{
    pack p;
    const char *core = run_environment("CORE");
    lifecycle_pack(l, &p, 4 + (*core != 0) + (*l->numerics != 0), "Hello");
    pack_number(&p, "pid", (uint64_t)getpid());
    pack_number(&p, "incarnation", strtoull(run_environment("INCARNATION"), NULL, 10));
    pack_text(&p, "protocol", "2.11"); /* protocol/codec.py */
    pack_number(&p, "slots", l->slots);
    if (*core)
        pack_number(&p, "core", strtoull(core, NULL, 10));
    if (*l->numerics)
        pack_text(&p, "numerics", l->numerics);
    lifecycle_send(l, &p);
}

static void send_empty(lifecycle *l, const char *type)
{
    pack p;
    lifecycle_pack(l, &p, 0, type);
    lifecycle_send(l, &p);
}

static void send_heartbeat(lifecycle *l)
{
    pack p;
    lifecycle_pack(l, &p, 3, "Beat");
    pack_text(&p, "state", "ready");
    pack_number(&p, "step", l->step);
    pack_inner_map(&p, "counters", 0);
    lifecycle_send(l, &p);
}

void lifecycle_tick(lifecycle *l)
{
    const uint64_t now = lifecycle_now_ms();
    if (l->control.fd < 0 && now >= l->connect_at) {
        char identity[64];
        snprintf(identity, sizeof identity, "%s-%llu", l->role, (unsigned long long)l->index);
        wire_connect(&l->control, l->path, "DEALER", identity);
        l->connect_at = now + LIFECYCLE_RETRY_MS;
        l->hello_at = 0;
    }
    if (l->control.open && !l->welcomed && now >= l->hello_at) {
        send_hello(l);
        l->hello_at = now + HELLO_MS;
    } else if (l->control.open && l->welcomed && now >= l->beat_at) {
        send_heartbeat(l);
        l->beat_at = now + LIFECYCLE_TICK_MS;
    }
}

static void welcome(lifecycle *l, uint64_t pid)
{
    if (l->welcomed && pid != l->coordinator_pid)
        send_hello(l); /* a restarted coordinator does not know this process */
    else if (l->available)
        send_empty(l, "Ready");
    l->welcomed = 1;
    l->coordinator_pid = pid;
}

const uint8_t *lifecycle_receive(lifecycle *l, size_t *bytes)
{
    const uint8_t *map;
    if (l->control.fd >= 0 && !wire_receive(&l->control))
        wire_close(&l->control);
    while ((map = wire_next(&l->control, bytes))) {
        const value type = unpack_field(map, *bytes, "type"), pid = unpack_field(map, *bytes, "coordinator_pid");
        if (value_is(type, "Welcome")) {
            if (pid.kind == 'n')
                welcome(l, pid.number);
        } else if (value_is(type, "Drain")) {
            l->draining = 1;
        } else if (value_is(type, "Reject")) {
            fprintf(stderr, "the coordinator rejects this %s\n", l->role);
            exit(1);
        } else {
            return map;
        }
    }
    return NULL;
}

void lifecycle_become_available(lifecycle *l)
{
    if (!l->available && l->welcomed)
        send_empty(l, "Ready");
    l->available = 1;
}

void lifecycle_report_drained(lifecycle *l)
{
    send_empty(l, "Drained");
}
