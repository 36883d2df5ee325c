/* Blocks of neurons on an OpenCL device, with the bits of the native engine's kernels.
 *
 * Products of groups of 32 weights are sums of integers, so exact in any order; their scaled sums round, and go in the order of one set of
 * vector instructions (ORDER; native/kernels has the originals). A row is computed by LANES work items, one for each partial sum of that order.
 *
 *   values   a neuron's trigger; where it fires its value, for up to TOKENS pairs of a token and its expert at once
 *   lists    of each block and pair, the neurons whose value is not zero, in index order
 *   downs    of each block and pair, the sum of these neurons' rows of Down: in batches of 32 rows (avx512), or row after row
 *   trees    the sums of 2^k blocks that are a node of the tree in which block sums meet
 *
 * blocks.py defines the sizes, and native/kernels/activation.h has the layout of a prepared activation. */
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
    return sum + 0.0f;
}

/* ---- values ----------------------------------------------------------------------------------------------------- */
static __global const uchar *cluster_of(__global const uchar *weights, uint expert, uint neuron)
{
    return weights + ((ulong)expert * HELD_CLUSTERS + neuron / CLUSTER_NEURONS) * CLUSTER_BYTES;
}

static __global const uchar *quants_of(__global const uchar *cluster, uint matrix, uint neuron)
{
    return cluster + matrix + (neuron % CLUSTER_NEURONS) * (GROUPS * GROUP_BYTES);
}

static __global const uchar *scales_of(__global const uchar *cluster, uint matrix, uint neuron)
{
    return cluster + matrix + (neuron % CLUSTER_NEURONS) * (GROUPS * 2);
}

static float activate(float gate, float up)
{
#if GATED && ACTIVATION_RELU
    return gate * up;
#elif GATED && ACTIVATION_DRELU
    return up > 0.0f ? gate * up : 0.0f;
#elif GATED
    return gate * gate * up;
#elif ACTIVATION_RELU
    return gate;
#else
    return gate * gate;
#endif
}

/* pairs: token, expert, weight (a float's bits), 0. chunks: first pair, pairs (at most TOKENS), group of the predictions, first pair's number
 * in its group. predicted: [group][HELD_NEURONS][mask_bytes], where mask_bytes is not 0. counters: triggers computed, fired, values not
 * zero. */
__kernel __attribute__((reqd_work_group_size(64, 1, 1))) void values(
    __global const uchar *weights, __global const uchar *vectors, uint vector_stride, __global const uint4 *pairs,
    __global const uint4 *chunks, __global const uchar *predicted, uint mask_bytes, __global const float *bias, uint neurons,
    __global float *hidden, __global uint *counters)
{
    const uint lane = get_local_id(0) % LANES, r = get_local_id(0) / LANES, neuron = get_group_id(0) * ROWS + r;
    const uint4 chunk = chunks[get_group_id(1)];
    const uint expert = pairs[chunk.x].y;
    __global const uchar *cluster = cluster_of(weights, expert, neuron < neurons ? neuron : 0);
    __local float sums[ROWS][TOKENS][LANES], triggers[ROWS][TOKENS];
    float own[TOKENS];
    activation x[TOKENS];
    uint wanted = 0, fired = 0;
    for (uint t = 0; t < TOKENS; t++) {
        x[t] = activation_at(vectors + (ulong)pairs[chunk.x + min(t, chunk.y - 1)].x * vector_stride);
        const uint bit = chunk.w + t;
        const int is_predicted =
            !mask_bytes || predicted[((ulong)chunk.z * HELD_NEURONS + neuron) * mask_bytes + bit / 8] >> bit % 8 & 1;
        wanted |= neuron < neurons && t < chunk.y && is_predicted ? 1u << t : 0;
    }

    if (wanted) {
        lane_sums(quants_of(cluster, TRIGGER_QUANTS, neuron), scales_of(cluster, TRIGGER_SCALES, neuron), x, chunk.y, lane, own);
        for (uint t = 0; t < chunk.y; t++)
            sums[r][t][lane] = own[t];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint t = lane; t < chunk.y && wanted; t += LANES) {
        const float trigger = tree(sums[r][t]);
        triggers[r][t] = HAS_BIAS && neuron < NEURONS ? trigger + bias[neuron] : trigger;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint t = 0; t < chunk.y; t++)
        fired |= wanted >> t & 1 && triggers[r][t] > THRESHOLD ? 1u << t : 0;

#if GATED
    if (fired) {
        lane_sums(quants_of(cluster, UP_QUANTS, neuron), scales_of(cluster, UP_SCALES, neuron), x, chunk.y, lane, own);
        for (uint t = 0; t < chunk.y; t++)
            sums[r][t][lane] = own[t];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
    for (uint t = lane; t < chunk.y && neuron < HELD_NEURONS; t += LANES) {
        float value = 0.0f;
        if (fired >> t & 1)
            value = activate(triggers[r][t], GATED ? tree(sums[r][t]) : 0.0f);
        hidden[(ulong)(chunk.x + t) * HELD_NEURONS + neuron] = value;
    }
    if (lane == 0 && wanted)
        atomic_add(counters, popcount(wanted));
    if (lane == 0 && fired)
        atomic_add(counters + 1, popcount(fired));
}

/* ---- lists ------------------------------------------------------------------------------------------------------ */
/* Work groups are (block, pair). list_neurons, list_factors: [pair][block][BLOCK_NEURONS]; list_counts: [pair][block]. */
__kernel __attribute__((reqd_work_group_size(64, 1, 1))) void lists(__global const uint4 *pairs, __global const float *hidden,
                                                                    __global uint *list_neurons, __global float *list_factors,
                                                                    __global uint *list_counts, __global uint *counters)
{
    const uint block = get_group_id(0), blocks = get_num_groups(0), pair = get_group_id(1), item = get_local_id(0);
    const float share = as_float(pairs[pair].z);
    const ulong list = (ulong)pair * blocks + block;
    __local uint before[65];
    uint count = 0;
    for (uint from = 0; from < BLOCK_NEURONS; from += 64) {
        const uint i = from + item, neuron = block * BLOCK_NEURONS + i;
        const float value = i < BLOCK_NEURONS && neuron < HELD_NEURONS ? hidden[(ulong)pair * HELD_NEURONS + neuron] : 0.0f;
        const uint is_listed = value != 0.0f;
        before[item + 1] = is_listed;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (item == 0) {
            before[0] = 0;
            for (uint k = 1; k <= 64; k++)
                before[k] += before[k - 1];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (is_listed) {
            list_neurons[list * BLOCK_NEURONS + count + before[item]] = neuron;
            list_factors[list * BLOCK_NEURONS + count + before[item]] = share * value;
        }
        count += before[64];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (item == 0) {
        list_counts[list] = count;
        atomic_add(counters + 2, count);
    }
}

/* ---- downs ------------------------------------------------------------------------------------------------------ */
/* A work item has four bytes of every row: four columns, in q4 eight. */
#define ITEMS (GROUP_BYTES / 4) /* of a group */
#define WORK_GROUPS (64 / ITEMS) /* groups of 32 columns in a work group */
#if TYPE_Q4
#define COLUMNS 8
#else
#define COLUMNS 4
#endif

static void weights_of(__global const uchar *quants, uint at, int *w)
{
    const uchar4 bytes = vload4(0, quants + at);
#if TYPE_Q4
    const int4 low = convert_int4(bytes & (uchar4)15) - 8, high = convert_int4(bytes >> (uchar4)4) - 8;
    vstore4(low, 0, w);
    vstore4(high, 1, w);
#else
    vstore4(convert_int4(as_char4(bytes)), 0, w);
#endif
}

static float factor_of(__global const uchar *weights, uint expert, uint neuron, float a, uint g)
{
    __global const uchar *scales = scales_of(cluster_of(weights, expert, neuron), DOWN_SCALES, neuron);
    return a * vload_half(g, (__global const half *)scales);
}

#if ORDER == AVX512
#define BATCH 32
#define MOST 32639.0f /* of a factor in steps: two bytes of 127 */
#if DIVIDE_IN_DOUBLE
#define DIVIDE(a, b) ((float)((double)(a) / (double)(b)))
#else
#define DIVIDE(a, b) ((a) / (b))
#endif

/* Rows go in batches. Of a batch and a group the factors become integers, in steps of a 32639th of the largest; a batch's sum is exact,
 * and added with one rounding. */
static void add_rows(__global const uchar *weights, uint expert, __global const uint *neurons, __global const float *factors,
                     uint count, uint g, uint item, uint part, __local float *largest, __local int (*steps)[BATCH], float *y)
{
    const uint own = item / ITEMS;
    for (uint from = 0; from < count; from += BATCH) {
        const uint rows = min((uint)BATCH, count - from);
        float mine[BATCH / ITEMS];
        uint most = as_uint(0x1p-100f);
        for (uint i = part, n = 0; i < rows; i += ITEMS, n++) {
            mine[n] = g < GROUPS ? factor_of(weights, expert, neurons[from + i], factors[from + i], g) : 0.0f;
            most = max(most, as_uint(mine[n]) & 0x7fffffff); /* as integers, so that what is no number is the largest */
        }
        largest[item] = as_float(most);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = 0; i < ITEMS; i++)
            most = max(most, as_uint(largest[own * ITEMS + i]));
        const float rounding = 0x1.8p23f + 128.0f, per_step = DIVIDE(MOST, as_float(most)), step = DIVIDE(as_float(most), MOST);
        for (uint i = part, n = 0; i < rows; i += ITEMS, n++)
            steps[own][i] = as_int(fma(mine[n], per_step, rounding)) - as_int(rounding);
        barrier(CLK_LOCAL_MEM_FENCE);
        int sums[COLUMNS] = {0};
        for (uint i = 0; i < rows && g < GROUPS; i++) {
            const uint neuron = neurons[from + i];
            int w[COLUMNS];
            weights_of(quants_of(cluster_of(weights, expert, neuron), DOWN_QUANTS, neuron), g * GROUP_BYTES + 4 * part, w);
            for (uint k = 0; k < COLUMNS; k++)
                sums[k] += steps[own][i] * w[k];
        }
        for (uint k = 0; k < COLUMNS; k++)
            y[k] = fma((float)sums[k], step, y[k]);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
#else
#define BATCH 1
static void add_rows(__global const uchar *weights, uint expert, __global const uint *neurons, __global const float *factors,
                     uint count, uint g, uint item, uint part, __local float *largest, __local int (*steps)[BATCH], float *y)
{
    for (uint i = 0; i < count && g < GROUPS; i++) {
        const float factor = factor_of(weights, expert, neurons[i], factors[i], g);
        int w[COLUMNS];
        weights_of(quants_of(cluster_of(weights, expert, neurons[i]), DOWN_QUANTS, neurons[i]), g * GROUP_BYTES + 4 * part, w);
        for (uint k = 0; k < COLUMNS; k++)
#if ORDER == SCALAR
            y[k] += factor * (float)w[k];
#else
            y[k] = fma(factor, (float)w[k], y[k]);
#endif
    }
}
#endif

/* Work groups are (stretch of columns, block, pair). sums: [pair][block][WIDTH]. */
__kernel __attribute__((reqd_work_group_size(64, 1, 1))) void downs(__global const uchar *weights, __global const uint4 *pairs,
                                                                    __global const uint *list_neurons,
                                                                    __global const float *list_factors,
                                                                    __global const uint *list_counts, __global float *sums)
{
    const uint item = get_local_id(0), g = get_group_id(0) * WORK_GROUPS + item / ITEMS, part = item % ITEMS;
    const uint block = get_group_id(1), blocks = get_num_groups(1), pair = get_group_id(2);
    const ulong list = (ulong)pair * blocks + block;
    __local float largest[64];               /* what a batch needs */
    __local int steps[WORK_GROUPS][BATCH];
    float y[COLUMNS] = {0.0f};
    add_rows(weights, pairs[pair].y, list_neurons + list * BLOCK_NEURONS, list_factors + list * BLOCK_NEURONS, list_counts[list], g,
             item, part, largest, steps, y);
    if (g >= GROUPS)
        return;
    __global float *out = sums + list * WIDTH + g * 32 + 4 * part;
    vstore4(vload4(0, y), 0, out);
#if TYPE_Q4
    vstore4(vload4(1, y), 0, out + 16);
#endif
}

/* ---- trees ------------------------------------------------------------------------------------------------------ */
/* Block sums meet in a tree that pairs neighbours, level by level: 2^k blocks from a multiple of 2^k on are a node. Of so many first blocks
 * there is one for each bit set, from the highest. Work groups are (stretch of columns, node, pair). nodes: [pair][node][WIDTH]. */
__kernel __attribute__((reqd_work_group_size(64, 1, 1))) void trees(__global float *sums, uint blocks, __global float *nodes)
{
    const uint column = get_global_id(0), node = get_group_id(1), pair = get_group_id(2);
    uint first = 0, left = blocks;
    for (uint i = 0; i < node; i++) {
        const uint size = 1u << (31 - clz(left));
        first += size;
        left -= size;
    }
    if (column >= WIDTH)
        return;
    __global float *rows = sums + ((ulong)pair * blocks + first) * WIDTH + column;
    const uint size = 1u << (31 - clz(left));
    for (uint step = 1; step < size; step *= 2)
        for (uint i = 0; i < size; i += 2 * step)
            rows[i * WIDTH] += rows[(i + step) * WIDTH];
    nodes[((ulong)pair * get_num_groups(1) + node) * WIDTH + column] = rows[0];
}
