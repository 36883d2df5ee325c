/* Triggers of neurons, and values of those that fire, for up to TOKENS (token, expert) pairs at once. Compiled behind clusters.cl. */
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
        triggers[r][t] = tree(sums[r][t]) + (HAS_BIAS && neuron < NEURONS ? bias[neuron] : 0.0f);
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
            value = activate(triggers[r][t], GATED ? tree(sums[r][t]) + 0.0f : 0.0f);
        hidden[(ulong)(chunk.x + t) * HELD_NEURONS + neuron] = value;
    }
    if (lane == 0 && wanted)
        atomic_add(counters, popcount(wanted));
    if (lane == 0 && fired)
        atomic_add(counters + 1, popcount(fired));
}
