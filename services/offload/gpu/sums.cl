/* Sums of blocks of neurons, compiled behind clusters.cl with the type of Down.
 *
 *   lists    of each block and pair, the neurons whose value is not zero, in index order
 *   downs    of each block and pair, the sum of these neurons' rows of Down: in batches of 32 rows (avx512), or row after row
 *   trees    the sums of 2^k blocks that are a node of the tree in which block sums meet */
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
/* A work item computes four bytes of every row: four columns, or eight as nibbles. */
#define ITEMS (GROUP_BYTES / 4) /* of a group */
#define WORK_GROUPS (64 / ITEMS) /* groups of 32 columns in a work group */
#if NIBBLES
#define COLUMNS 8
#else
#define COLUMNS 4
#endif

/* Weights, or with HAS_MINIMUM codes. */
static void weights_of(__global const uchar *quants, uint g, uint part, int *w)
{
    const uchar4 bytes = vload4(0, quants + g * GROUP_BYTES + 4 * part);
#if NIBBLES
    uchar4 low = bytes & (uchar4)15, high = bytes >> (uchar4)4;
#if HIGH_BITS
    low |= as_uchar4(spread4(plane_bits(quants, 0, g) >> 4 * part) << 4);
    high |= as_uchar4(spread4(plane_bits(quants, 1, g) >> 4 * part) << 4);
#endif
#if HIGH_BITS == 2
    low |= as_uchar4(spread4(plane_bits(quants, 2, g) >> 4 * part) << 5);
    high |= as_uchar4(spread4(plane_bits(quants, 3, g) >> 4 * part) << 5);
#endif
#if HAS_CODEBOOK
    vstore4(convert_int4(shuffle(CODE_VALUES, low)), 0, w);
    vstore4(convert_int4(shuffle(CODE_VALUES, high)), 1, w);
#else
    vstore4(convert_int4(low) - (HAS_OFFSET ? 8 : 0), 0, w);
    vstore4(convert_int4(high) - (HAS_OFFSET ? 8 : 0), 1, w);
#endif
#else
    vstore4(convert_int4(as_char4(bytes)), 0, w);
#endif
}

/* A row's scale and minimum. */
static float2 factors_of(__global const uchar *weights, uint expert, uint neuron, uint g)
{
    return factors_at(scales_of(cluster_of(weights, expert, neuron), DOWN_SCALES, neuron), g);
}

#if ORDER == AVX512
#define BATCH 32
#else
#define BATCH 1
#endif

/* The data of a batch of rows that the items of a work group share. */
typedef struct {
    float largest[64];
    int steps[WORK_GROUPS][BATCH];
    float minimums[WORK_GROUPS][BATCH];
} batch;

#if ORDER == AVX512
#define MOST 32639.0f /* of a factor in steps: two bytes of 127 */
#if DIVIDE_IN_DOUBLE
#define DIVIDE(a, b) ((float)((double)(a) / (double)(b)))
#else
#define DIVIDE(a, b) ((a) / (b))
#endif

/* Add rows in batches. For each batch and group the factors become integers, in steps of a 32639th of the largest, so that the batch's
 * sum is exact and is added with one rounding. Then the sum of the batch's minimums is subtracted. */
static void add_rows(__global const uchar *weights, uint expert, __global const uint *neurons, __global const float *factors,
                     uint count, uint g, uint item, uint part, __local batch *b, float *y)
{
    const uint own = item / ITEMS;
    for (uint from = 0; from < count; from += BATCH) {
        const uint rows = min((uint)BATCH, count - from);
        float mine[BATCH / ITEMS];
        uint most = as_uint(0x1p-100f);
        for (uint i = part, n = 0; i < rows; i += ITEMS, n++) {
            const float2 both = g < GROUPS ? factors_of(weights, expert, neurons[from + i], g) : (float2)(0.0f);
            mine[n] = factors[from + i] * both.x;
            b->minimums[own][i] = both.y;
            most = max(most, as_uint(mine[n]) & 0x7fffffff); /* compared as integers, so that NaN is the largest */
        }
        b->largest[item] = as_float(most);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = 0; i < ITEMS; i++)
            most = max(most, as_uint(b->largest[own * ITEMS + i]));
        const float rounding = 0x1.8p23f + 128.0f, per_step = DIVIDE(MOST, as_float(most)), step = DIVIDE(as_float(most), MOST);
        for (uint i = part, n = 0; i < rows; i += ITEMS, n++)
            b->steps[own][i] = as_int(fma(mine[n], per_step, rounding)) - as_int(rounding);
        barrier(CLK_LOCAL_MEM_FENCE);
        int sums[COLUMNS] = {0};
        for (uint i = 0; i < rows && g < GROUPS; i++) {
            const uint neuron = neurons[from + i];
            int w[COLUMNS];
            weights_of(quants_of(cluster_of(weights, expert, neuron), DOWN_QUANTS, neuron), g, part, w);
            for (uint k = 0; k < COLUMNS; k++)
                sums[k] += b->steps[own][i] * w[k];
        }
        float minimum = 0.0f;
        for (uint i = 0; i < rows && HAS_MINIMUM; i++)
            minimum = fma(factors[from + i], b->minimums[own][i], minimum);
        for (uint k = 0; k < COLUMNS; k++)
            y[k] = fma((float)sums[k], step, y[k]) - minimum;
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
#else
static void add_rows(__global const uchar *weights, uint expert, __global const uint *neurons, __global const float *factors,
                     uint count, uint g, uint item, uint part, __local batch *b, float *y)
{
    for (uint i = 0; i < count && g < GROUPS; i++) {
        const float2 both = factors_of(weights, expert, neurons[i], g);
        const float factor = factors[i] * both.x;
#if HAS_MINIMUM && ORDER != SCALAR /* minimums of four rows at once; those of the last count % 4 rows one by one */
        const uint four_begins = i % 4 == 0 && count - i >= 4, is_single = count - i / 4 * 4 < 4;
        if (four_begins || is_single) {
            float minimum = 0.0f;
            for (uint n = i; n < (four_begins ? i + 4 : i + 1); n++)
                minimum = fma(factors[n], factors_of(weights, expert, neurons[n], g).y, minimum);
            for (uint k = 0; k < COLUMNS; k++)
                y[k] -= minimum;
        }
#endif
        int w[COLUMNS];
        weights_of(quants_of(cluster_of(weights, expert, neurons[i]), DOWN_QUANTS, neurons[i]), g, part, w);
        for (uint k = 0; k < COLUMNS; k++)
#if ORDER == SCALAR
            y[k] = y[k] + factor * (float)w[k] - (HAS_MINIMUM ? factors[i] * both.y : 0.0f);
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
    __local batch shared;
    float y[COLUMNS] = {0.0f};
    add_rows(weights, pairs[pair].y, list_neurons + list * BLOCK_NEURONS, list_factors + list * BLOCK_NEURONS, list_counts[list], g,
             item, part, &shared, y);
    if (g >= GROUPS)
        return;
    __global float *out = sums + list * WIDTH + g * 32 + 4 * part;
    vstore4(vload4(0, y), 0, out);
#if NIBBLES
    vstore4(vload4(1, y), 0, out + 16);
#endif
}

/* ---- trees ------------------------------------------------------------------------------------------------------ */
/* Block sums meet in a tree that pairs neighbours, level by level: 2^k blocks from a multiple of 2^k on are a node. The first `blocks`
 * blocks have a node for each bit set in `blocks`, highest first. Work groups are (stretch of columns, node, pair). nodes: [pair][node][WIDTH]. */
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
