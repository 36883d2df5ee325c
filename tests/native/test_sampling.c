/* Sampling: the sets that top-k and top-p keep, the frequencies drawn, and the numbers behind them. */
#include "check.h"
#include "neuronpipe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N = 300 };
static float logits[N];
static int32_t scratch[2 * N];

static int by_logit(const void *a, const void *b) {
    const int32_t i = *(const int32_t *)a, j = *(const int32_t *)b;
    return logits[i] != logits[j] ? (logits[i] < logits[j] ? 1 : -1) : (i > j) - (i < j);
}

/* The ids that may be drawn, most likely first: how many, and their probabilities. */
static size_t kept_set(float temperature, size_t top_k, double top_p, int32_t *ids, double *probability) {
    double total = 0, sum = 0, kept = 0;
    for (int32_t i = 0; i < N; i++) ids[i] = i;
    qsort(ids, N, sizeof *ids, by_logit);
    const size_t most = top_k ? top_k : N;
    for (size_t i = 0; i < most; i++) total += probability[i] = exp(((double)logits[ids[i]] - logits[ids[0]]) / temperature);
    size_t count = 0;
    do sum += probability[count++]; while (count < most && (top_p >= 1 || sum < top_p * total));
    for (size_t i = 0; i < count; i++) kept += probability[i];
    for (size_t i = 0; i < count; i++) probability[i] /= kept;
    return count;
}

static void test_kept_sets_and_frequencies(float temperature, int32_t top_k, float top_p) {
    enum { DRAWS = 1000 };
    static int32_t ids[N];
    static double probability[N];
    static long drawn[N];
    const size_t count = kept_set(temperature, (size_t)top_k, top_p, ids, probability);
    memset(drawn, 0, sizeof drawn);
    for (int i = 0; i < DRAWS; i++) { /* evenly spread numbers: frequencies are exact to one draw */
        const int32_t id = np_sample(logits, N, temperature, top_k, top_p, (i + 0.5) / DRAWS, scratch);
        CHECK(id >= 0 && id < N, "id %d", id);
        drawn[id]++;
    }
    long inside = 0;
    for (size_t i = 0; i < count; i++) {
        inside += drawn[ids[i]];
        CHECK(fabs((double)drawn[ids[i]] - probability[i] * DRAWS) <= 1.1, "t=%g k=%d p=%g rank %zu: %ld draws, want %g",
              temperature, top_k, top_p, i, drawn[ids[i]], probability[i] * DRAWS);
    }
    CHECK(inside == DRAWS, "t=%g k=%d p=%g: %ld draws outside the set", temperature, top_k, top_p, DRAWS - inside);
}

static void test_edges(void) {
    const float equal[4] = {1, 3, 3, 2}, poisoned[3] = {0, NAN, 1};
    CHECK(np_sample(equal, 4, 0.0f, 0, 1.0f, 0.0, scratch) == 1, "greedy takes the lowest of equals");
    CHECK(np_sample(equal, 4, 1.0f, 1, 1.0f, 0.999, scratch) == 1, "top-k 1 takes the lowest of equals");
    CHECK(np_sample(equal, 4, 1.0f, 0, 0.0f, 0.999, scratch) == 1, "top-p 0 keeps one");
    CHECK(np_sample(equal, 4, 1e-30f, 0, 1.0f, 0.999, scratch) == 2, "a tiny temperature leaves the equals");
    CHECK(np_sample(equal, 4, 1.0f, 99, 1.0f, 0.0, scratch) == 0, "top-k beyond n is all, in order of ids");
    CHECK(np_sample(poisoned, 3, 0.0f, 0, 1.0f, 0.0, scratch) == NP_E_ARGUMENT, "NaN, greedy");
    CHECK(np_sample(poisoned, 3, 1.0f, 0, 1.0f, 0.0, scratch) == NP_E_ARGUMENT, "NaN, drawn");
    CHECK(np_sample(equal, 0, 1.0f, 0, 1.0f, 0.0, scratch) == NP_E_ARGUMENT, "nothing to draw from");
    CHECK(np_sample(equal, 4, 1.0f, 0, 1.0f, 1.0, scratch) == NP_E_ARGUMENT, "uniform is below 1");
    CHECK(np_sample(equal, 4, NAN, 0, 1.0f, 0.5, scratch) == NP_E_ARGUMENT, "temperature NaN");
    const float tail[4] = {0, 0.3f, 0.1f, -INFINITY};
    CHECK(np_sample(tail, 4, 1.0f, 0, 1.0f, 0x1.fffffffffffffp-1, scratch) == 2, "the last number draws a possible id");
    const float masked[4] = {-INFINITY, 0, -INFINITY, 0};
    for (double u = 0; u < 1; u += 0.05) {
        const int32_t id = np_sample(masked, 4, 1.0f, 3, 1.0f, u, scratch), all = np_sample(masked, 4, 1.0f, 0, 1.0f, u, scratch);
        CHECK(id % 2 == 1 && all % 2 == 1, "a masked id is never drawn: %d %d", id, all);
    }
}

static void test_uniform(void) {
    long bins[64] = {0};
    for (uint64_t i = 0; i < 64000; i++) {
        const double u = np_uniform(7, i);
        CHECK(u >= 0.0 && u < 1.0 && u == np_uniform(7, i), "%g", u);
        bins[(int)(u * 64)]++;
    }
    for (int i = 0; i < 64; i++) CHECK(labs(bins[i] - 1000) < 160, "bin %d: %ld", i, bins[i]); /* five deviations */
    CHECK(np_uniform(7, 0) != np_uniform(8, 0) && np_uniform(7, 1) != np_uniform(8, 0), "seeds differ");
}

static void test_log_probability(void) {
    double sum = 0;
    for (int32_t i = 0; i < N; i++) sum += exp(np_log_probability(logits, N, i));
    CHECK(fabs(sum - 1) < 1e-12, "probabilities sum to 1: %.17g", sum);
    CHECK(isnan(np_log_probability(logits, N, N)) && isnan(np_log_probability(logits, N, -1)), "ids outside");
    const float far[2] = {0, 2000};
    CHECK(np_log_probability(far, 2, 0) == -2000 && np_log_probability(far, 2, 1) == 0, "no overflow");
}

int main(void) {
    for (int i = 0; i < N; i++) logits[i] = 4.0f * random_float() * random_float() + (i % 10 ? 0.0f : 3.0f);
    for (int i = 100; i < 120; i++) logits[i] = 5.0f; /* equals, to be kept by id */
    static const float temperatures[] = {0.3f, 1.0f, 2.0f}, shares[] = {1.0f, 0.9f, 0.3f};
    static const int32_t counts[] = {0, 1, 10, 40};
    for (int t = 0; t < 3; t++)
        for (int p = 0; p < 3; p++)
            for (int k = 0; k < 4; k++) test_kept_sets_and_frequencies(temperatures[t], counts[k], shares[p]);
    test_edges();
    test_uniform();
    test_log_probability();
    return checks_report();
}
