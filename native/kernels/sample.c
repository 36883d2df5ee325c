/* From logits to a token. Deterministic: the same logits, options and uniform number give the same id, whatever the C
 * library. */
#include "kernels/exponential.h"

#include <math.h>
#include <string.h>

/* True if candidate a comes before b: by higher logit; of equal ones, by lower id. */
static int comes_before(const float *logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sift_down(int32_t *heap, size_t count, size_t at, const float *logits) {
    const int32_t moving = heap[at];
    for (size_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && comes_before(logits, heap[child + 1], heap[child])) child++;
        if (!comes_before(logits, heap[child], moving)) break;
        heap[at] = heap[child];
    }
    heap[at] = moving;
}

/* Remove the first candidate from the heap. */
static int32_t take(int32_t *heap, size_t *count, const float *logits) {
    const int32_t first = heap[0];
    heap[0] = heap[--*count];
    if (*count) sift_down(heap, *count, 0, logits);
    return first;
}

/* Unnormalized probability, 1 for the greatest. Equal infinities have no difference, so they are compared first. */
static double weight_of(float logit, float greatest, float temperature) {
    return logit == greatest ? 1.0 : np_exponential((logit - greatest) / temperature);
}

/* 0 if too unlikely to be sampled. If floor is known to be 0, the compiler omits the comparison. */
static double floored(double weight, double floor) { return floor > 0.0 && weight < floor ? 0.0 : weight; }

/* The first of `ids` (NULL: 0, 1, 2...) at which the running sum of weights exceeds `target`. It exists, since target
 * is less than the total, which was added in the same order. */
static int32_t pick(const float *logits, const int32_t *ids, size_t count, float greatest, float temperature, double floor,
                    double target) {
    double sum = 0.0;
    int32_t id = 0;
    for (size_t i = 0; i < count && sum <= target; i++) {
        id = ids ? ids[i] : (int32_t)i;
        sum += floored(weight_of(logits[id], greatest, temperature), floor);
    }
    return id;
}

static int has_penalty(const np_sampling *how) {
    return how->repetition_penalty != 1.0f || how->frequency_penalty != 0.0f || how->presence_penalty != 0.0f;
}

static int in_range(const np_sampling *how, size_t n) {
    if (isnan(how->temperature) || isnan(how->top_p) || !(how->min_p <= 1.0f) || how->top_k < 0 ||
        how->penalty_tokens < 0)
        return 0;
    if (how->prompt_tokens > how->text_tokens || !(how->repetition_penalty > 0.0f) || !isfinite(how->repetition_penalty) ||
        !isfinite(how->frequency_penalty) || !isfinite(how->presence_penalty))
        return 0;
    if (has_penalty(how))
        for (size_t i = 0; i < how->text_tokens; i++)
            if (how->text[i] < 0 || (size_t)how->text[i] >= n) return 0;
    for (size_t i = 0; i < how->biased_count; i++)
        if (how->biased[i] < 0 || (size_t)how->biased[i] >= n || isnan(how->biases[i])) return 0;
    return 1;
}

/* Apply penalties once per distinct token, after counting how often it was generated. counts: zeros, before and
 * after. */
static void penalize(const np_sampling *how, float *logits, int32_t *counts) {
    const int32_t seen = INT32_MIN; /* the top bit: the token occurs in the sequence */
    const size_t window = how->penalty_tokens ? (size_t)how->penalty_tokens : how->text_tokens;
    const size_t first = how->text_tokens > window ? how->text_tokens - window : 0;
    for (size_t i = first; i < how->text_tokens; i++) {
        int32_t *count = &counts[how->text[i]];
        *count = (*count + (i >= how->prompt_tokens)) | seen;
    }
    for (size_t i = first; i < how->text_tokens; i++) {
        const int32_t id = how->text[i];
        if (!counts[id]) continue;
        const float times = (float)(counts[id] & INT32_MAX);
        float logit = logits[id];
        logit = logit > 0.0f ? logit / how->repetition_penalty : logit * how->repetition_penalty;
        if (times > 0.0f) logit -= how->frequency_penalty * times + how->presence_penalty;
        logits[id] = logit;
        counts[id] = 0;
    }
}

static void forbid(const uint8_t *allowed, size_t n, float *logits) {
    for (size_t first = 0; first < n; first += 8) {
        const unsigned bits = allowed[first / 8];
        if (bits == 0xff) continue; /* grammars often allow nearly all tokens */
        for (size_t j = 0; j < 8 && first + j < n; j++)
            if (!(bits >> j & 1)) logits[first + j] = -INFINITY;
    }
}

/* The logits to sample from: the original, or a modified copy in scratch[2*n...]; NULL if one is NaN, which the copy
 * might hide. */
static const float *adjusted(const float *logits, size_t n, const np_sampling *how, int32_t *scratch) {
    const int penalties = has_penalty(how);
    if (!penalties && !how->biased_count && !how->allowed) return logits;
    float *copy = (float *)(scratch + 2 * n);
    for (size_t i = 0; i < n; i++) {
        if (isnan(logits[i])) return NULL;
        copy[i] = logits[i];
    }
    if (penalties) {
        memset(scratch, 0, n * sizeof *scratch);
        penalize(how, copy, scratch);
    }
    for (size_t i = 0; i < how->biased_count; i++) copy[how->biased[i]] += how->biases[i];
    if (how->allowed) forbid(how->allowed, n, copy);
    return copy;
}

/* The lowest id with the greatest logit; -1 if one is NaN. In lanes, which compilers vectorize. */
static int32_t likeliest(const float *logits, size_t n) {
    enum { LANES = 16 };
    float greatest[LANES];
    int32_t broken[LANES] = {0};
    for (int l = 0; l < LANES; l++) greatest[l] = -INFINITY;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) {
            const float logit = logits[i + l];
            greatest[l] = logit > greatest[l] ? logit : greatest[l];
            broken[l] |= isnan(logit);
        }
    for (; i < n; i++) {
        greatest[0] = logits[i] > greatest[0] ? logits[i] : greatest[0];
        broken[0] |= isnan(logits[i]);
    }
    for (int l = 1; l < LANES; l++) {
        greatest[0] = greatest[l] > greatest[0] ? greatest[l] : greatest[0];
        broken[0] |= broken[l];
    }
    if (broken[0]) return -1;
    i = 0;
    while (logits[i] != greatest[0]) i++;
    return (int32_t)i;
}

int32_t np_sample(const float *logits, size_t n, const np_sampling *how, double uniform, int32_t *scratch) {
    if (n == 0 || n > INT32_MAX || !in_range(how, n) || !(uniform >= 0.0 && uniform < 1.0)) return NP_E_ARGUMENT;
    const float *from = adjusted(logits, n, how, scratch);
    if (!from) return NP_E_ARGUMENT;
    const int32_t best = likeliest(from, n);
    if (best < 0) return NP_E_ARGUMENT;
    if (from != logits && from[best] == -INFINITY) return NP_E_BANNED;
    if (how->temperature <= 0.0f) return best;
    const float greatest = from[best], temperature = how->temperature, top_p = how->top_p;
    const double floor = how->min_p;
    const size_t max_count = how->top_k && (size_t)how->top_k < n ? (size_t)how->top_k : n;
    double total = 0.0;
    if (max_count == n) {
        const double least = top_p >= 1.0f ? floor : 0.0;
        for (size_t i = 0; i < n; i++) total += floored(weight_of(from[i], greatest, temperature), least);
        if (top_p >= 1.0f) return pick(from, NULL, n, greatest, temperature, floor, uniform * total);
    }
    /* A heap yields candidates in order at log n each: few are needed, and sorting all would cost more than the
     * softmax. */
    int32_t *heap = scratch, *kept = scratch + n;
    size_t left = n, count = 0;
    for (size_t i = 0; i < n; i++) heap[i] = (int32_t)i;
    for (size_t i = n / 2; i-- > 0;) sift_down(heap, n, i, from);
    if (max_count < n) {
        for (; count < max_count; count++) {
            kept[count] = take(heap, &left, from);
            total += weight_of(from[kept[count]], greatest, temperature);
        }
    }
    double sum = 0.0, reached = 0.0; /* of tokens that may be sampled; of all that count for top_p */
    size_t cut = 0;
    do {
        if (cut == count) kept[count++] = take(heap, &left, from);
        const double weight = weight_of(from[kept[cut++]], greatest, temperature);
        sum += floored(weight, floor);
        reached += weight;
    } while (cut < max_count && (top_p >= 1.0f || reached < top_p * total));
    return pick(from, kept, cut, greatest, temperature, floor, uniform * sum);
}

/* The output function of SplitMix64 (Steele, Lea, Flood 2014): every bit of the input moves every bit of the output. */
static uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

double np_uniform(uint64_t seed, uint64_t counter) {
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    return (double)(mix(mix(seed + golden) + (counter + 1) * golden) >> 11) * 0x1p-53;
}

void np_greatest(const float *logits, size_t n, size_t count, int32_t *ids) {
    size_t listed = 0;
    for (size_t i = 0; i < n && count; i++) {
        if (listed == count && !comes_before(logits, (int32_t)i, ids[listed - 1])) continue;
        size_t at = listed < count ? listed++ : listed - 1;
        for (; at && comes_before(logits, (int32_t)i, ids[at - 1]); at--) ids[at] = ids[at - 1];
        ids[at] = (int32_t)i;
    }
}

void np_log_probabilities(const float *logits, size_t n, const int32_t *ids, size_t count, double *out) {
    double greatest = -INFINITY, sum = 0.0;
    for (size_t i = 0; i < n; i++) greatest = logits[i] > greatest ? logits[i] : greatest;
    for (size_t i = 0; i < n; i++) sum += logits[i] == greatest ? 1.0 : exp(logits[i] - greatest);
    for (size_t i = 0; i < count; i++) {
        if (ids[i] < 0 || (size_t)ids[i] >= n) out[i] = NAN;
        else out[i] = logits[ids[i]] == greatest ? -log(sum) : logits[ids[i]] - greatest - log(sum);
    }
}
