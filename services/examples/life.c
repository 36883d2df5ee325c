#include "life.h"

#include "place.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { HELLO_MS = 1000 };

uint64_t life_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

void life_begin(life *l, const char *run, const char *role, const char *numerics, uint64_t slots, int available)
{
    *l = (life){.control = {.fd = -1}, .role = role, .numerics = numerics, .slots = slots, .available = available};
    l->index = strtoull(place_fact("INDEX"), NULL, 10);
    if ((size_t)snprintf(l->path, sizeof l->path, "%s/control", run) >= sizeof l->path)
        place_fail(run, "the run's directory has too long a name");
}

void life_send(life *l, const pack *p)
{
    wire_send(&l->control, p->bytes, p->count);
}

void life_pack(const life *l, pack *p, unsigned entries, const char *type)
{
    pack_map(p, entries + 2, type);
    pack_text(p, "role", l->role);
    pack_number(p, "index", l->index);
}

static void say_hello(life *l)
{
    pack p;
    const char *core = place_fact("CORE");
    life_pack(l, &p, 4 + (*core != 0) + (*l->numerics != 0), "Hello");
    pack_number(&p, "pid", (uint64_t)getpid());
    pack_number(&p, "incarnation", strtoull(place_fact("INCARNATION"), NULL, 10));
    pack_text(&p, "protocol", "2.2");
    pack_number(&p, "slots", l->slots);
    if (*core)
        pack_number(&p, "core", strtoull(core, NULL, 10));
    if (*l->numerics)
        pack_text(&p, "numerics", l->numerics);
    life_send(l, &p);
}

static void say(life *l, const char *type)
{
    pack p;
    life_pack(l, &p, 0, type);
    life_send(l, &p);
}

static void say_beat(life *l)
{
    pack p;
    life_pack(l, &p, 3, "Beat");
    pack_text(&p, "state", "ready");
    pack_number(&p, "step", l->step);
    pack_inner_map(&p, "counters", 0);
    life_send(l, &p);
}

void life_tick(life *l)
{
    const uint64_t now = life_now_ms();
    if (l->control.fd < 0 && now >= l->connect_at) {
        char identity[64];
        snprintf(identity, sizeof identity, "%s-%llu", l->role, (unsigned long long)l->index);
        wire_connect(&l->control, l->path, "DEALER", identity);
        l->connect_at = now + LIFE_SOON_MS;
        l->hello_at = 0;
    }
    if (l->control.open && !l->welcomed && now >= l->hello_at) {
        say_hello(l);
        l->hello_at = now + HELLO_MS;
    } else if (l->control.open && l->welcomed && now >= l->beat_at) {
        say_beat(l);
        l->beat_at = now + LIFE_WAIT_MS;
    }
}

static void welcome(life *l, uint64_t pid)
{
    if (l->welcomed && pid != l->coordinator_pid)
        say_hello(l); /* another one, which knows nothing of us */
    else if (l->available)
        say(l, "Ready");
    l->welcomed = 1;
    l->coordinator_pid = pid;
}

const uint8_t *life_hear(life *l, size_t *bytes)
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

void life_become_available(life *l)
{
    if (!l->available && l->welcomed)
        say(l, "Ready");
    l->available = 1;
}

void life_end(life *l)
{
    say(l, "Drained");
}
