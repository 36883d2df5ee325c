/* A process's place in a run, from SPEC.md sections 2 and 10: its role and index, the package's figures, shared memory. */
#ifndef PLACE_H
#define PLACE_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
#define PLACE_ENDS [[noreturn]]
extern "C" {
#else
#define PLACE_ENDS _Noreturn
#endif

/* The environment's NEURONPIPE_<name>; ends the process with a line when there is none. */
const char *place_fact(const char *name);
/* folder/name, read to its end and ended by a zero byte. */
char *place_read(const char *folder, const char *name, size_t *bytes);
/* What there is at a path of JSON names, "layout/clusters"; ends the process when it is not there. A text's memory is the caller's. */
uint64_t json_number(const char *text, const char *path);
double json_real(const char *text, const char *path);
int json_truth(const char *text, const char *path);
char *json_text(const char *text, const char *path);
int json_has(const char *text, const char *path); /* 1: it is there, and not null */
/* An array's item, to be looked into by these functions; NULL behind its last one. */
const char *json_item(const char *text, const char *path, size_t number);

typedef struct {
    uint8_t *memory;
    const char *layout; /* a line for each field */
    size_t bytes;
    int fd;
} segment;
/* Open and map a segment as run.json says. */
segment segment_open(const char *run_file, const char *name, int writable);
void segment_close(segment *s);
/* Whether its content is final; and to make it so, once it is closed. */
int segment_is_sealed(const segment *s);
void segment_seal(const segment *s);
/* Memory of this process alone, laid out as run.json's `private` says. */
segment segment_private(const char *run_file, const char *name);
/* Where a field lies; shape: its lengths, two at most. Ends the process when there is no such field, or it lies outside. */
void *segment_field(const segment *s, const char *name, size_t shape[2]);
size_t segment_field_bytes(const segment *s, const char *name);

/* End the run with a line for a person. */
PLACE_ENDS void place_fail(const char *what, const char *why);
#ifdef __cplusplus
}
#endif
#endif
