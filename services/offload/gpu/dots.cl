/* Rows of weights times prepared activations on an OpenCL device, with the bits of the native engine's kernels.
 *
 * Products of groups of 32 weights are sums of integers, so exact in any order; their scaled sums round, and go in the order of one set of
 * vector instructions (ORDER; native/kernels has the originals). A row of WIDTH weights is computed by LANES work items, one for each partial
 * sum of that order. native/kernels/activation.h has the layout of a prepared activation. */
#pragma OPENCL FP_CONTRACT OFF

#define SCALAR 0
#define AVX2 1
#define AVX512 2
#define NEON 3
#define DOTPROD 4

#if ORDER == SCALAR
#define LANES 1
#elif ORDER == AVX512
#define LANES 16
#elif ORDER == AVX2
#define LANES 8
#else
#define LANES 4
#endif
#define ROWS (64 / LANES) /* of a work group */
#define TOKENS 4
#define GROUPS (WIDTH / 32)

/* ---- dot products ----------------------------------------------------------------------------------------------- */
typedef struct {
    __global const char *quants;
    __global const float *scales;
    __global const int *sums;
} activation;

static activation activation_at(__global const uchar *bytes)
{
    activation x;
    x.quants = (__global const char *)bytes;
    x.scales = (__global const float *)(bytes + (WIDTH + 127) / 128 * 128);
    x.sums = (__global const int *)(x.scales + (GROUPS + 15) / 16 * 16);
    return x;
}

/* c + the product of four bytes each. */
static int dot4(uint w, uint x, int c)
{
#if defined(cl_khr_integer_dot_product)
    return c + dot_4x8packed_ss_int(w, x);
#elif defined(cl_nv_pragma_unroll) /* NVIDIA's compiler */
    int sum;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(w), "r"(x), "r"(c));
    return sum;
#else
    const int4 p = convert_int4(as_char4(w)) * convert_int4(as_char4(x));
    return c + p.x + p.y + p.z + p.w;
#endif
}

static int dot16(uint4 w, __global const char *x, int c)
{
    const uint4 v = *(__global const uint4 *)x;
    return dot4(w.w, v.w, dot4(w.z, v.z, dot4(w.y, v.y, dot4(w.x, v.x, c))));
}

#if TYPE_Q4
#define GROUP_BYTES 16
/* Where a group's first 16 quants are in a q4 activation; its other 16 come 64 later. */
#define LOW(g) ((g) / 4 * 128 + (g) % 4 * 16)
#define HIGH(g) (LOW(g) + 64)
#else
#define GROUP_BYTES 32
#define LOW(g) ((g) * 32)
#define HIGH(g) (LOW(g) + 16)
#endif

/* The 32 weights of a group, a byte each; with BIASED 8 more than they are, which the group's sum takes off again. */
#define BIASED (TYPE_Q4 && ORDER != NEON && ORDER != DOTPROD)
typedef struct {
    uint4 low, high;
} group;

static group group_at(__global const uchar *quants, uint g)
{
    __global const uint4 *words = (__global const uint4 *)quants;
    group w;
#if TYPE_Q4
    const uint4 both = words[g];
    w.low = both & 0x0f0f0f0f;
    w.high = both >> 4 & 0x0f0f0f0f;
#if !BIASED
    w.low = ((w.low | 0x80808080) - 0x08080808) ^ 0x80808080;
    w.high = ((w.high | 0x80808080) - 0x08080808) ^ 0x80808080;
#endif
#else
    w.low = words[2 * g];
    w.high = words[2 * g + 1];
#endif
    return w;
}

/* What a lane takes of a group: all of it; or a quarter of the bytes, as they come apart in a register. */
static int lane_dot(const group *w, const activation *x, uint g, uint lane)
{
    __global const char *low = x->quants + LOW(g), *high = x->quants + HIGH(g);
#if ORDER == SCALAR || ORDER == AVX512
    return dot16(w->low, low, dot16(w->high, high, BIASED ? -8 * x->sums[g] : 0));
#elif ORDER == NEON /* products of eight bytes and the eight after them are added, then neighbours */
    const char *low_weights = (const char *)&w->low, *high_weights = (const char *)&w->high;
    int dot = 0;
    for (uint i = 0; i < 2; i++)
        for (uint eight = 0; eight < 16; eight += 8) {
            const uint at = 2 * lane + i + eight;
            dot += low_weights[at] * low[at] + high_weights[at] * high[at];
        }
    return dot;
#else
    const uint *low_words = (const uint *)&w->low, *high_words = (const uint *)&w->high, word = lane % 4;
    __global const uint *low_activations = (__global const uint *)low, *high_activations = (__global const uint *)high;
#if ORDER == AVX2 && !TYPE_Q4 /* eight lanes of four bytes */
    return lane < 4 ? dot4(low_words[word], low_activations[word], 0) : dot4(high_words[word], high_activations[word], 0);
#else /* AVX2: what biased weights are too much is taken off in the first lane of the group */
    const int bias = BIASED && word == 0 ? -8 * x->sums[g] : 0;
    return dot4(low_words[word], low_activations[word], dot4(high_words[word], high_activations[word], bias));
#endif
#endif
}

/* A lane's sums of a row with so many activations; the compiler knows how many. */
static inline void some_lane_sums(__global const uchar *quants, __global const uchar *scales, const activation *x, uint tokens, uint lane,
                                  float *sums)
{
#if ORDER == AVX512
    const uint first = lane, step = 16;
#elif ORDER == AVX2 && TYPE_Q4
    const uint first = lane / 4, step = 2;
#else
    const uint first = 0, step = 1;
#endif
    for (uint t = 0; t < tokens; t++)
        sums[t] = 0.0f;
    for (uint g = first; g < GROUPS; g += step) {
        const group w = group_at(quants, g);
        const float scale = vload_half(g, (__global const half *)scales);
        for (uint t = 0; t < tokens; t++) {
            const float dot = (float)lane_dot(&w, &x[t], g, lane);
#if ORDER == SCALAR
            sums[t] += dot * (scale * x[t].scales[g]);
#else
            sums[t] = fma(dot, scale * x[t].scales[g], sums[t]);
#endif
        }
    }
}

static void lane_sums(__global const uchar *quants, __global const uchar *scales, const activation *x, uint tokens, uint lane, float *sums)
{
    if (tokens == 1)
        some_lane_sums(quants, scales, x, 1, lane, sums);
    else
        some_lane_sums(quants, scales, x, TOKENS, lane, sums);
}

/* The lanes' sums, added in the order of the instructions. */
static float tree(__local const float *s)
{
#if ORDER == SCALAR
    const float sum = s[0];
#elif ORDER == AVX512
    float fours[4];
    for (uint i = 0; i < 4; i++)
        fours[i] = (s[4 * i] + s[4 * i + 2]) + (s[4 * i + 1] + s[4 * i + 3]);
    const float sum = (fours[0] + fours[2]) + (fours[1] + fours[3]);
#elif ORDER == AVX2
    const float sum = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
#else
    const float sum = (s[0] + s[1]) + (s[2] + s[3]);
#endif
    return sum;
}
