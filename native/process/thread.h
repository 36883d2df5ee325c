/* This library's own threads and condition variables. */
#ifndef NP_PROCESS_THREAD_H
#define NP_PROCESS_THREAD_H
#include <pthread.h>
#include <stddef.h>

/* The smallest stack that all C libraries accept. */
enum { NP_MIN_STACK_BYTES = 128 << 10 };

/* Start a thread with all signals blocked: they go to the threads that expect them. Returns 0 or an errno. */
int np_thread_start(pthread_t *thread, size_t stack_bytes, void *(*run)(void *), void *argument);

/* A condition variable that waits by the monotonic clock, so that setting the wall clock ends no wait. */
void np_condition_init(pthread_cond_t *condition);

/* Wait until it is signalled, for at most timeout_ms (negative: no limit). Returns 0 or ETIMEDOUT; may return
 * spuriously. */
int np_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int timeout_ms);

#endif
