/* The tile kernel on a processor with AMX, with everything that saves and restores tiles at once: threads sharing a
 * core, signal handlers that multiply as well, and forked children. */
#include "check.h"
#include "neuronpipe.h"

#if defined(__x86_64__)
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROWS = 70, TOKENS = 40, N = 1056, THREADS = 4, CALLS = 400 };

static uint8_t *panel;
static const void *quants_at[ROWS], *scales_at[ROWS];
static float want[TOKENS * ROWS];
static _Atomic int differing, handled;

static int multiply_differs(void) {
    float out[TOKENS * ROWS];
    memset(out, 0, sizeof out);
    np_dot_panel(NP_Q4, quants_at, scales_at, ROWS, N, panel, TOKENS, NULL, out, ROWS);
    return memcmp(out, want, sizeof out) != 0;
}

static void on_signal(int number) {
    (void)number;
    if (multiply_differs()) atomic_fetch_add(&differing, 1);
    atomic_fetch_add(&handled, 1);
}

static void *many_calls(void *unused) {
    for (int i = 0; i < CALLS; i++)
        if (multiply_differs()) atomic_fetch_add(&differing, 1);
    return unused;
}

static void prepare(void) {
    const size_t quant_bytes = np_quant_bytes(NP_Q4, N), scale_bytes = np_scale_bytes(NP_Q4, N);
    const size_t stride = (np_activation_bytes(NP_Q4, N) + 63) / 64 * 64;
    uint8_t *quants = malloc(ROWS * quant_bytes), *activations = aligned_alloc(64, TOKENS * stride);
    uint16_t *scales = malloc(ROWS * scale_bytes);
    for (size_t i = 0; i < ROWS * quant_bytes; i++) quants[i] = (uint8_t)random_bits();
    for (size_t i = 0; i < ROWS * scale_bytes / 2; i++) scales[i] = (uint16_t)(0x2400 + (random_bits() & 0x3ff));
    for (size_t r = 0; r < ROWS; r++) {
        quants_at[r] = quants + r * quant_bytes;
        scales_at[r] = (const uint8_t *)scales + r * scale_bytes;
    }
    for (size_t t = 0; t < TOKENS; t++) {
        float x[N];
        for (size_t j = 0; j < N; j++) x[j] = random_float();
        np_activation_prepare(NP_Q4, x, N, activations + t * stride);
        np_dot_scattered(NP_Q4, quants_at, scales_at, ROWS, N, NULL, activations + t * stride, 0, 1, want + t * ROWS, 0);
    }
    panel = aligned_alloc(64, (np_panel_bytes(NP_Q4, N, TOKENS) + 63) / 64 * 64);
    np_panel_prepare(NP_Q4, activations, stride, TOKENS, N, panel);
    free(activations);
}

static void test_threads_and_signals(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    const struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    pthread_t threads[THREADS];
    sigaction(SIGPROF, &action, NULL);
    setitimer(ITIMER_PROF, &often, NULL);
    for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, many_calls, NULL);
    many_calls(NULL);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    setitimer(ITIMER_PROF, &never, NULL);
    CHECK(atomic_load(&differing) == 0, "%d products have other bits", atomic_load(&differing));
    CHECK(atomic_load(&handled) > 0, "no signal came");
}

static void test_children(void) {
    for (int i = 0; i < 8; i++) {
        const pid_t child = fork();
        if (child == 0) _exit(multiply_differs());
        CHECK(!multiply_differs(), "beside a child");
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && status == 0, "child %d: status %d", i, status);
    }
}

int main(void) {
    if (!np_isa_select("amx")) {
        printf("no tiles: %s\n", np_isa_amx_lacks());
        return CHECKS_SKIPPED;
    }
    prepare();
    test_threads_and_signals();
    test_children();
    return checks_report();
}
#else
int main(void) {
    printf("no tiles on this architecture\n");
    return CHECKS_SKIPPED;
}
#endif
