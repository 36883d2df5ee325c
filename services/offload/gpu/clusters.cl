/* Places of neurons' rows in the device's copy of the slots, for values.cl and sums.cl. blocks.py defines the sizes. */
static __global const uchar *cluster_of(__global const uchar *weights, uint expert, uint neuron)
{
    return weights + ((ulong)expert * HELD_CLUSTERS + neuron / CLUSTER_NEURONS) * CLUSTER_BYTES;
}

static __global const uchar *quants_of(__global const uchar *cluster, uint matrix, uint neuron)
{
    return cluster + matrix + (neuron % CLUSTER_NEURONS) * ROW_BYTES;
}

static __global const uchar *scales_of(__global const uchar *cluster, uint matrix, uint neuron)
{
    return cluster + matrix + (neuron % CLUSTER_NEURONS) * ROW_SCALE_BYTES;
}
