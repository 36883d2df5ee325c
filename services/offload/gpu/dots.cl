/* Rows of weights times prepared activations on an OpenCL device, with the bits of the native engine's kernels.
 *
 * The product of a group of 32 weights is a sum of integers, exact in any order. Scaled sums of groups round, so they follow the order of
 * one instruction set (ORDER; native/kernels has the originals). A row of WIDTH weights is computed by LANES work items, one for each partial
 * sum of that order. native/kernels/activation.h has the layout of a prepared activation.
 *
 * The type of the weights: NIBBLES (all but q8), with HAS_MINIMUM (q4k, q5k, q6k, q4h, q5h), HALF_SCALES (q4h, q5h), HIGH_BITS above the
 * nibbles (q5k and q5h 1, q6k 2), and CODEBOOK, the values of the nibbles (iq4, mxfp4). */
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

#if NIBBLES
#define GROUP_BYTES 16 /* without planes */
/* Where a group's first 16 quants are in a q4 activation; its other 16 come 64 later. */
#define LOW(g) ((g) / 4 * 128 + (g) % 4 * 16)
#define HIGH(g) (LOW(g) + 64)
#else
#define GROUP_BYTES 32
#define LOW(g) ((g) * 32)
#define HIGH(g) (LOW(g) + 16)
#endif

#define ROW_BYTES (GROUPS * (GROUP_BYTES + 4 * HIGH_BITS))
#if HAS_MINIMUM
#define BLOCK_SCALE_BYTES (HALF_SCALES ? 32 : 16) /* of eight groups */
#define ROW_SCALE_BYTES ((GROUPS + 7) / 8 * BLOCK_SCALE_BYTES)
#else
#define ROW_SCALE_BYTES (GROUPS * 2)
#endif

#if HIGH_BITS
/* Bits of a plane, each the lowest of a byte. */
static uint spread4(uint bits)
{
    return (bits & 15) * 0x204081 & 0x01010101;
}

static uint4 spread16(uint bits)
{
    return (uint4)(spread4(bits), spread4(bits >> 4), spread4(bits >> 8), spread4(bits >> 12));
}

/* A row's planes are halves of 16 bits a group: of the first 16 codes, and of the last. */
static uint plane_bits(__global const uchar *quants, uint half_plane, uint g)
{
    return ((__global const ushort *)(quants + GROUPS * GROUP_BYTES))[half_plane * GROUPS + g];
}
#endif

#ifdef CODEBOOK
#define HAS_CODEBOOK 1
#define CODE_VALUES ((char16)(CODEBOOK))
#else
#define HAS_CODEBOOK 0
#endif

/* The 32 weights of a group as bytes; with HAS_MINIMUM their codes; with BIASED each is 8 too large, for which lane_dot corrects. */
#define HAS_OFFSET (NIBBLES && !HAS_MINIMUM && !HAS_CODEBOOK) /* a nibble is 8 more than the weight */
#define BIASED (HAS_OFFSET && ORDER != NEON && ORDER != DOTPROD)
#define SIGNED (HAS_OFFSET && !BIASED)
typedef struct {
    uint4 low, high;
} group;

static group group_at(__global const uchar *quants, uint g)
{
    __global const uint4 *words = (__global const uint4 *)quants;
    group w;
#if NIBBLES
#if ROW_BYTES % 16
    const uint4 both = vload4(g, (__global const uint *)quants);
#else
    const uint4 both = words[g];
#endif
    w.low = both & 0x0f0f0f0f;
    w.high = both >> 4 & 0x0f0f0f0f;
#if HIGH_BITS
    w.low |= spread16(plane_bits(quants, 0, g)) << 4;
    w.high |= spread16(plane_bits(quants, 1, g)) << 4;
#endif
#if HIGH_BITS == 2
    w.low |= spread16(plane_bits(quants, 2, g)) << 5;
    w.high |= spread16(plane_bits(quants, 3, g)) << 5;
#endif
#if SIGNED
    w.low = ((w.low | 0x80808080) - 0x08080808) ^ 0x80808080;
    w.high = ((w.high | 0x80808080) - 0x08080808) ^ 0x80808080;
#endif
#if HAS_CODEBOOK
    w.low = as_uint4(shuffle(CODE_VALUES, as_uchar16(w.low)));
    w.high = as_uint4(shuffle(CODE_VALUES, as_uchar16(w.high)));
#endif
#else
    w.low = words[2 * g];
    w.high = words[2 * g + 1];
#endif
    return w;
}

/* A lane's part of a group's product: that of all bytes, or of a quarter of them, split as the instructions split them. */
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
#if ORDER == AVX2 && !NIBBLES /* eight lanes of four bytes */
    return lane < 4 ? dot4(low_words[word], low_activations[word], 0) : dot4(high_words[word], high_activations[word], 0);
#else /* AVX2: the first lane of the group corrects for the bias */
    const int bias = BIASED && word == 0 ? -8 * x->sums[g] : 0;
    return dot4(low_words[word], low_activations[word], dot4(high_words[word], high_activations[word], bias));
#endif
#endif
}

/* A group's scale and, with HAS_MINIMUM, its minimum. */
static float2 factors_at(__global const uchar *scales, uint g)
{
#if HALF_SCALES
    __global const half *block = (__global const half *)(scales + g / 8 * BLOCK_SCALE_BYTES);
    return (float2)(vload_half(g % 8, block), vload_half(8 + g % 8, block));
#elif HAS_MINIMUM
    __global const uchar *block = scales + g / 8 * BLOCK_SCALE_BYTES;
    const uint i = g % 8, low = block[4 + i], high = block[12 + i % 4] >> i / 4 * 4;
    return (float2)((float)((low & 15) | (high & 3) << 4), (float)(low >> 4 | (high & 12) << 2)) * vload_half2(0, (__global const half *)block);
#else
    return (float2)(vload_half(g, (__global const half *)scales), 0.0f);
#endif
}

#if HAS_MINIMUM
/* Subtract a group's minimum times the sum of its activations. */
static float less_minimum(float sum, float minimum, const activation *x, uint g)
{
#if ORDER == SCALAR
    return sum - minimum * ((float)x->sums[g] * x->scales[g]);
#else
    return fma(-minimum, (float)x->sums[g] * x->scales[g], sum);
#endif
}
#endif

/* A lane's sums of a row for each token. `tokens` is constant at each call, so that the compiler unrolls the loops. */
static inline void some_lane_sums(__global const uchar *quants, __global const uchar *scales, const activation *x, uint tokens, uint lane,
                                  float *sums)
{
#if ORDER == AVX512
    const uint first = lane, step = 16;
#elif ORDER == AVX2 && NIBBLES
    const uint first = lane / 4, step = 2;
#else
    const uint first = 0, step = 1;
#endif
    for (uint t = 0; t < tokens; t++)
        sums[t] = 0.0f;
    for (uint g = first; g < GROUPS; g += step) {
        const group w = group_at(quants, g);
        const float2 factors = factors_at(scales, g);
#if HAS_MINIMUM && ORDER != SCALAR && ORDER != AVX512 /* each lane subtracts the minimum of one of the next LANES groups, before their products */
        const uint own = g / LANES * LANES + lane;
        if (g % LANES < step && own < GROUPS)
            for (uint t = 0; t < tokens; t++)
                sums[t] = less_minimum(sums[t], factors_at(scales, own).y, &x[t], own);
#endif
        for (uint t = 0; t < tokens; t++) {
            const float dot = (float)lane_dot(&w, &x[t], g, lane);
#if ORDER == SCALAR
            sums[t] += dot * (factors.x * x[t].scales[g]);
#else
            sums[t] = fma(dot, factors.x * x[t].scales[g], sums[t]);
#endif
        }
#if HAS_MINIMUM && (ORDER == SCALAR || ORDER == AVX512)
        for (uint t = 0; t < tokens; t++)
            sums[t] = less_minimum(sums[t], factors.y, &x[t], g);
#endif
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
