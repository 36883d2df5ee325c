/* Sampling: the sets of top-k and top-p, sample frequencies, and uniform numbers. */
#include "check.h"
#include "neuronpipe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N = 300 };
static float logits[N];
static int32_t scratch[3 * N];
static const np_sampling plain = {.top_p = 1.0f, .repetition_penalty = 1.0f};

static int32_t sample(const float *from, size_t n, float temperature, int32_t top_k, float top_p, double uniform) {
    np_sampling how = plain;
    how.temperature = temperature, how.top_k = top_k, how.top_p = top_p;
    return np_sample(from, n, &how, uniform, scratch);
}

static int by_logit(const void *a, const void *b) {
    const int32_t i = *(const int32_t *)a, j = *(const int32_t *)b;
    return logits[i] != logits[j] ? (logits[i] < logits[j] ? 1 : -1) : (i > j) - (i < j);
}

/* The ids that may be sampled, most likely first, with their number and probabilities. */
static size_t kept_set(float temperature, size_t top_k, double top_p, double min_p, int32_t *ids, double *probability) {
    double total = 0, sum = 0, kept = 0;
    for (int32_t i = 0; i < N; i++) ids[i] = i;
    qsort(ids, N, sizeof *ids, by_logit);
    const size_t most = top_k ? top_k : N;
    for (size_t i = 0; i < most; i++) total += probability[i] = exp(((double)logits[ids[i]] - logits[ids[0]]) / temperature);
    size_t count = 0;
    do sum += probability[count++]; while (count < most && (top_p >= 1 || sum < top_p * total));
    while (probability[count - 1] < min_p) count--;
    for (size_t i = 0; i < count; i++) kept += probability[i];
    for (size_t i = 0; i < count; i++) probability[i] /= kept;
    return count;
}

static void test_kept_sets_and_frequencies(float temperature, int32_t top_k, float top_p, float min_p) {
    enum { SAMPLES = 1000 };
    static int32_t ids[N];
    static double probability[N];
    static long counts[N];
    const size_t count = kept_set(temperature, (size_t)top_k, top_p, min_p, ids, probability);
    const np_sampling how = {.temperature = temperature, .top_k = top_k, .top_p = top_p, .min_p = min_p, .repetition_penalty = 1.0f};
    memset(counts, 0, sizeof counts);
    for (int i = 0; i < SAMPLES; i++) { /* evenly spread numbers: frequencies are exact to one sample */
        const int32_t id = np_sample(logits, N, &how, (i + 0.5) / SAMPLES, scratch);
        CHECK(id >= 0 && id < N, "id %d", id);
        counts[id]++;
    }
    long inside = 0;
    for (size_t i = 0; i < count; i++) {
        inside += counts[ids[i]];
        CHECK(fabs((double)counts[ids[i]] - probability[i] * SAMPLES) <= 1.1, "t=%g k=%d p=%g min=%g rank %zu: %ld samples, want %g",
              temperature, top_k, top_p, min_p, i, counts[ids[i]], probability[i] * SAMPLES);
    }
    CHECK(inside == SAMPLES, "t=%g k=%d p=%g min=%g: %ld samples outside the set", temperature, top_k, top_p, min_p, SAMPLES - inside);
}

static void test_edges(void) {
    const float equal[4] = {1, 3, 3, 2}, poisoned[3] = {0, NAN, 1};
    CHECK(sample(equal, 4, 0.0f, 0, 1.0f, 0.0) == 1, "greedy takes the lowest of equals");
    CHECK(sample(equal, 4, 1.0f, 1, 1.0f, 0.999) == 1, "top-k 1 takes the lowest of equals");
    CHECK(sample(equal, 4, 1.0f, 0, 0.0f, 0.999) == 1, "top-p 0 keeps one");
    CHECK(sample(equal, 4, 1e-30f, 0, 1.0f, 0.999) == 2, "a tiny temperature leaves the equals");
    CHECK(sample(equal, 4, 1.0f, 99, 1.0f, 0.0) == 0, "top-k beyond n is all, in order of ids");
    CHECK(sample(poisoned, 3, 0.0f, 0, 1.0f, 0.0) == NP_E_ARGUMENT, "NaN, greedy");
    CHECK(sample(poisoned, 3, 1.0f, 0, 1.0f, 0.0) == NP_E_ARGUMENT, "NaN, sampled");
    CHECK(sample(equal, 0, 1.0f, 0, 1.0f, 0.0) == NP_E_ARGUMENT, "nothing to sample from");
    CHECK(sample(equal, 4, 1.0f, 0, 1.0f, 1.0) == NP_E_ARGUMENT, "uniform is below 1");
    CHECK(sample(equal, 4, NAN, 0, 1.0f, 0.5) == NP_E_ARGUMENT, "temperature NaN");
    const float tail[4] = {0, 0.3f, 0.1f, -INFINITY};
    CHECK(sample(tail, 4, 1.0f, 0, 1.0f, 0x1.fffffffffffffp-1) == 2, "the last number gives a possible id");
    const float masked[4] = {-INFINITY, 0, -INFINITY, 0};
    for (double u = 0; u < 1; u += 0.05) {
        const int32_t id = sample(masked, 4, 1.0f, 3, 1.0f, u), all = sample(masked, 4, 1.0f, 0, 1.0f, u);
        CHECK(id % 2 == 1 && all % 2 == 1, "a masked id is never sampled: %d %d", id, all);
    }
}

/* Greedy takes the greatest of the changed logits, so that a changed copy shows every one of them. */
static void test_penalties_biases_and_bans(void) {
    enum { TEXT = 6, PROMPT = 3 };
    const float given[6] = {2.0f, -1.0f, 3.0f, 0.5f, 4.0f, 4.0f};
    const int32_t text[TEXT] = {4, 1, 5, 2, 4, 2}, biased[2] = {3, 1};
    const float biases[2] = {1.25f, -0.5f};
    np_sampling how = plain;
    how.text = text, how.text_tokens = TEXT, how.prompt_tokens = PROMPT;
    how.repetition_penalty = 2.0f, how.frequency_penalty = 0.25f, how.presence_penalty = 0.5f;
    how.biased = biased, how.biases = biases, how.biased_count = 2;
    /* 1: multiplied and biased; 2 and 5: divided, 2 generated twice; 4: in the prompt, and generated once */
    const double want[6] = {2.0, -2.5, 0.5, 1.75, 1.25, 2.0};
    static const int order[6] = {0, 5, 3, 4, 2, 1}; /* greatest first, lowest id among equals */
    uint8_t allowed = 0x3f;
    how.allowed = &allowed;
    for (int i = 0; i < 6; i++) {
        CHECK(np_sample(given, 6, &how, 0.0, scratch) == order[i], "rank %d", i);
        allowed &= (uint8_t)~(1u << order[i]);
    }
    CHECK(np_sample(given, 6, &how, 0.0, scratch) == NP_E_BANNED, "nothing is allowed");
    allowed = 0x3f;
    how.temperature = 1.0f;
    double total = 0, below = 0;
    for (int i = 0; i < 6; i++) total += exp(want[i] - 2.0);
    for (int32_t i = 0; i < 6; i++) { /* where one id's share ends and the next one's begins */
        const double middle = below + exp(want[i] - 2.0) / 2;
        CHECK(np_sample(given, 6, &how, middle / total, scratch) == i, "id %d", i);
        below += exp(want[i] - 2.0);
    }
    const float banned[2] = {-INFINITY, 0.0f};
    how.biases = banned;
    allowed = 1 << 3;
    CHECK(np_sample(given, 6, &how, 0.0, scratch) == NP_E_BANNED, "a ban meets the only one allowed");
    const float poisoned[6] = {NAN, 0, 0, 0, 0, 0};
    CHECK(np_sample(poisoned, 6, &how, 0.0, scratch) == NP_E_ARGUMENT, "a NaN that is not allowed is still seen");
}

static void test_options_out_of_range(void) {
    const float given[3] = {1, 2, 3};
    const int32_t outside[1] = {3}, inside[1] = {0};
    const float nan_bias[1] = {NAN};
    np_sampling bad[8];
    for (int i = 0; i < 8; i++) bad[i] = plain;
    bad[0].min_p = 1.5f, bad[1].min_p = NAN, bad[2].repetition_penalty = 0.0f, bad[3].frequency_penalty = INFINITY;
    bad[4].presence_penalty = NAN, bad[5].prompt_tokens = 1;
    bad[6].text = outside, bad[6].text_tokens = 1, bad[6].presence_penalty = 1.0f;
    bad[7].biased = inside, bad[7].biases = nan_bias, bad[7].biased_count = 1;
    for (int i = 0; i < 8; i++) CHECK(np_sample(given, 3, &bad[i], 0.0, scratch) == NP_E_ARGUMENT, "case %d", i);
}

static void test_greatest(void) {
    static int32_t ids[N], first[N];
    for (int32_t i = 0; i < N; i++) ids[i] = i;
    qsort(ids, N, sizeof *ids, by_logit);
    for (size_t count = 0; count <= N; count = 2 * count + 1) {
        np_greatest(logits, N, count, first);
        CHECK(!memcmp(first, ids, count * sizeof *ids), "the first %zu", count);
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

static void test_log_probabilities(void) {
    static int32_t ids[N];
    static double logs[N];
    double sum = 0;
    for (int32_t i = 0; i < N; i++) ids[i] = i;
    np_log_probabilities(logits, N, ids, N, logs);
    for (int32_t i = 0; i < N; i++) sum += exp(logs[i]);
    CHECK(fabs(sum - 1) < 1e-12, "probabilities sum to 1: %.17g", sum);
    const int32_t outside[2] = {N, -1}, both[2] = {0, 1};
    np_log_probabilities(logits, N, outside, 2, logs);
    CHECK(isnan(logs[0]) && isnan(logs[1]), "ids outside");
    const float far[2] = {0, 2000};
    np_log_probabilities(far, 2, both, 2, logs);
    CHECK(logs[0] == -2000 && logs[1] == 0, "no overflow");
}

int main(void) {
    for (int i = 0; i < N; i++) logits[i] = 4.0f * random_float() * random_float() + (i % 10 ? 0.0f : 3.0f);
    for (int i = 100; i < 120; i++) logits[i] = 5.0f; /* equals, to be kept by id */
    static const float temperatures[] = {0.3f, 1.0f, 2.0f}, shares[] = {1.0f, 0.9f, 0.3f}, least[] = {0.0f, 0.12f};
    static const int32_t counts[] = {0, 1, 10, 40};
    for (int t = 0; t < 3; t++)
        for (int p = 0; p < 3; p++)
            for (int k = 0; k < 4; k++)
                for (int m = 0; m < 2; m++) test_kept_sets_and_frequencies(temperatures[t], counts[k], shares[p], least[m]);
    test_edges();
    test_uniform();
    test_log_probabilities();
    test_penalties_biases_and_bans();
    test_options_out_of_range();
    test_greatest();
    return checks_report();
}
