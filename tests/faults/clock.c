/* Preloaded into a run: every reading of the wall clock is hours away from the one before it, forwards or back. The monotonic clock
 * goes on as it does. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long jump_s(void)
{
    static const long hours[] = {0, 6, -3, 9, -7};
    static atomic_uint readings;
    return 3600 * hours[atomic_fetch_add(&readings, 1) % (sizeof hours / sizeof *hours)];
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    const long failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += jump_s();
    return (int)failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    (void)zone;
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    *now = (struct timeval){.tv_sec = precise.tv_sec, .tv_usec = precise.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *kept)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept)
        *kept = now.tv_sec;
    return now.tv_sec;
}
