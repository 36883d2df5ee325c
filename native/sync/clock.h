/* The monotonic clock, and the processor's hint for waiting loops. */
#ifndef NP_SYNC_CLOCK_H
#define NP_SYNC_CLOCK_H
#include <stdint.h>
#include <time.h>

static inline uint64_t np_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void np_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
    __asm__ volatile("yield");
#endif
}

#endif
