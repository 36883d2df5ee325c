/* In the place of ONNX Runtime's library: graphs that take the time of a neural processor and compute nothing, for the program npu-prefill.
 * NPU_DEVICE in the environment: TFLOP/s, and microseconds that each graph takes besides. Every value comes out as 0. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PLACES = 512, MIDDLE = 32768, S8 = 3 };

typedef struct {
    void *memory;
    int64_t rows, columns;
    int type;
} value;

static void *table[PLACES];
static double flop_per_s, start_s;

static const char *message_of(const void *status) { return status; }
static void *done(void) { return NULL; }
static const char *version(void) { return "simulated"; }

static void *create(const void *from, const void *how, void **out)
{
    (void)from;
    (void)how;
    *out = table;
    return NULL;
}

/* Functions whose last argument is where what they make goes, at other places of the arguments. */
static void *create_options(void **out) { return create(NULL, NULL, out); }
static void *create_session(const void *environment, const char *path, const void *options, void **out)
{
    (void)path;
    return create(environment, options, out);
}
static void *create_environment(int severity, const char *name, void **out)
{
    (void)severity;
    return create(name, NULL, out);
}
static void *create_memory(int allocator, int memory, void **out)
{
    (void)allocator;
    (void)memory;
    return create(NULL, NULL, out);
}

static void *create_tensor(const void *info, void *memory, size_t bytes, const int64_t *shape, size_t dimensions, int type, value **out)
{
    (void)info;
    (void)bytes;
    (void)dimensions;
    *out = malloc(sizeof **out);
    **out = (value){memory, shape[0], shape[1], type};
    return NULL;
}

static void *run(void *session, const void *options, const char *const *names, value *const *inputs, size_t count, const char *const *out_names,
                 size_t out_count, value **outputs)
{
    (void)session;
    (void)options;
    (void)names;
    (void)out_names;
    double weights = 0;
    for (size_t n = 0; n < count; n++)
        weights += inputs[n]->type == S8 ? (double)inputs[n]->rows * (double)inputs[n]->columns : 0;
    for (size_t n = 0; n < out_count; n++)
        for (int64_t i = 0; i < outputs[n]->rows * outputs[n]->columns; i++)
            ((uint16_t *)outputs[n]->memory)[i] = MIDDLE;
    const double s = start_s + 2 * (double)inputs[0]->rows * weights / flop_per_s;
    const struct timespec time = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
    nanosleep(&time, NULL);
    return NULL;
}

static void *placement(const void *session, const void ***parts, size_t *count)
{
    static const void *const one[1] = {table};
    (void)session;
    *parts = (const void **)one;
    *count = 1;
    return NULL;
}

static void *provider(const void *part, const char **name)
{
    (void)part;
    *name = "CPUExecutionProvider";
    return NULL;
}

static const void *api(uint32_t number)
{
    (void)number;
    return table;
}

const void *OrtGetApiBase(void)
{
    static const void *base[2];
    const char *device = getenv("NPU_DEVICE");
    double tflop_per_s, start_us;
    if (!device || sscanf(device, "%lf,%lf", &tflop_per_s, &start_us) != 2)
        return NULL;
    flop_per_s = tflop_per_s * 1e12;
    start_s = start_us * 1e-6;
    for (size_t n = 0; n < PLACES; n++)
        table[n] = (void *)done;
    table[2] = (void *)message_of; /* places as in services/offload/npu/program/ort.h */
    table[3] = (void *)create_environment;
    table[7] = (void *)create_session;
    table[9] = (void *)run;
    table[10] = (void *)create_options;
    table[49] = (void *)create_tensor;
    table[69] = (void *)create_memory;
    table[96] = (void *)free;
    table[407] = (void *)placement;
    table[408] = (void *)provider;
    base[0] = (void *)api;
    base[1] = (void *)version;
    return base;
}
