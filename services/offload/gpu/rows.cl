/* Products of whole matrices of WIDTH columns. Compiled behind dots.cl. */

/* All rows times the vectors of `tokens` tokens, plus each row's bias if has_bias. Work groups are (ROWS rows, TOKENS tokens).
 * out: [tokens][rows]. */
__kernel __attribute__((reqd_work_group_size(64, 1, 1))) void rows(
    __global const uchar *quants, __global const uchar *scales, __global const float *bias, uint has_bias, uint row_count,
    __global const uchar *vectors, uint vector_stride, uint tokens, __global float *out)
{
    const uint lane = get_local_id(0) % LANES, r = get_local_id(0) / LANES, row = get_group_id(0) * ROWS + r;
    const uint first = get_group_id(1) * TOKENS, count = min((uint)TOKENS, tokens - first);
    const ulong at = row < row_count ? row : 0; /* an item behind the last row computes the first and drops the result */
    __local float sums[ROWS][TOKENS][LANES];
    float own[TOKENS];
    activation x[TOKENS];
    for (uint t = 0; t < TOKENS; t++)
        x[t] = activation_at(vectors + (ulong)(first + min(t, count - 1)) * vector_stride);
    lane_sums(quants + at * ROW_BYTES, scales + at * ROW_SCALE_BYTES, x, count, lane, own);
    for (uint t = 0; t < count; t++)
        sums[r][t][lane] = own[t];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint t = lane; t < count && row < row_count; t += LANES)
        out[(ulong)(first + t) * row_count + row] = tree(sums[r][t]) + (has_bias ? bias[row] : 0.0f);
}
