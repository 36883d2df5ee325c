/* Threads of this library beside Python's: what starts them and what they wait with. */
#ifndef NP_PROCESS_THREAD_H
#define NP_PROCESS_THREAD_H
#include <pthread.h>
#include <stddef.h>

/* The least stack that every C library takes. */
enum { NP_LEAST_STACK_BYTES = 128 << 10 };

/* Start a thread that no signal interrupts: they go to the threads that expect them. Returns 0 or an errno. */
int np_thread_start(pthread_t *thread, size_t stack_bytes, void *(*run)(void *), void *argument);

/* A condition variable whose waits end by the monotonic clock, so that setting the wall clock ends none. */
void np_condition_init(pthread_cond_t *condition);

/* Wait until it is signalled, or so long; below 0 without end. Returns 0, or ETIMEDOUT. Like every such wait it may return for nothing. */
int np_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int timeout_ms);

#endif
