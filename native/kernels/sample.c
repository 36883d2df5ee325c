/* From logits to a token. Deterministic: the same logits, options and uniform number give the same id, whatever the C library. */
#include "kernels/exponential.h"

#include <math.h>

/* Is candidate a to be taken before b? Higher logit first, lower id among equals. */
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

/* Take the first candidate off the heap. */
static int32_t take(int32_t *heap, size_t *count, const float *logits) {
    const int32_t first = heap[0];
    heap[0] = heap[--*count];
    if (*count) sift_down(heap, *count, 0, logits);
    return first;
}

/* Unnormalized probability. Equal infinities have no difference, so that they are told apart first. */
static double weight_of(float logit, float greatest, float temperature) {
    return logit == greatest ? 1.0 : np_exponential((logit - greatest) / temperature);
}

/* The first of `ids` (NULL: 0, 1, 2...) at which the running sum of weights exceeds `target`. There is one, since target is less
 * than the whole sum, which was added up in the same order. */
static int32_t draw(const float *logits, const int32_t *ids, size_t count, float greatest, float temperature, double target) {
    double sum = 0.0;
    int32_t id = 0;
    for (size_t i = 0; i < count && sum <= target; i++) {
        id = ids ? ids[i] : (int32_t)i;
        sum += weight_of(logits[id], greatest, temperature);
    }
    return id;
}

int32_t np_sample(const float *logits, size_t n, float temperature, int32_t top_k, float top_p, double uniform,
                  int32_t *scratch) {
    if (n == 0 || n > INT32_MAX || isnan(temperature) || isnan(top_p) || top_k < 0 || !(uniform >= 0.0 && uniform < 1.0))
        return NP_E_ARGUMENT;
    int32_t best = 0;
    for (size_t i = 0; i < n; i++) {
        if (isnan(logits[i])) return NP_E_ARGUMENT;
        if (logits[i] > logits[best]) best = (int32_t)i;
    }
    if (temperature <= 0.0f) return best;
    const float greatest = logits[best];
    const size_t most = top_k && (size_t)top_k < n ? (size_t)top_k : n;
    double total = 0.0;
    if (most == n) {
        for (size_t i = 0; i < n; i++) total += weight_of(logits[i], greatest, temperature);
        if (top_p >= 1.0f) return draw(logits, NULL, n, greatest, temperature, uniform * total);
    }
    /* A heap gives the candidates in order at log n each: few are needed, and sorting all would cost more than the softmax. */
    int32_t *heap = scratch, *kept = scratch + n;
    size_t left = n, count = 0;
    for (size_t i = 0; i < n; i++) heap[i] = (int32_t)i;
    for (size_t i = n / 2; i-- > 0;) sift_down(heap, n, i, logits);
    if (most < n) {
        for (; count < most; count++) {
            kept[count] = take(heap, &left, logits);
            total += weight_of(logits[kept[count]], greatest, temperature);
        }
    }
    double sum = 0.0;
    size_t cut = 0;
    do {
        if (cut == count) kept[count++] = take(heap, &left, logits);
        sum += weight_of(logits[kept[cut++]], greatest, temperature);
    } while (cut < most && (top_p >= 1.0f || sum < top_p * total));
    return draw(logits, kept, cut, greatest, temperature, uniform * sum);
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

double np_log_probability(const float *logits, size_t n, int32_t id) {
    if (id < 0 || (size_t)id >= n) return NAN;
    double greatest = -INFINITY, sum = 0.0;
    for (size_t i = 0; i < n; i++) greatest = logits[i] > greatest ? logits[i] : greatest;
    for (size_t i = 0; i < n; i++) sum += logits[i] == greatest ? 1.0 : exp(logits[i] - greatest);
    return logits[id] == greatest ? -log(sum) : logits[id] - greatest - log(sum);
}
