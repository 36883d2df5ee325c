/* A process's place in a run, from SPEC.md sections 2 and 10: its role and index, the package's figures, shared memory. */
#ifndef PLACE_H
#define PLACE_H
#include <stddef.h>
#include <stdint.h>

/* The environment's NEURONPIPE_<name>; ends the process with a line when there is none. */
const char *place_fact(const char *name);
/* folder/name, read to its end and ended by a zero byte. */
char *place_read(const char *folder, const char *name, size_t *bytes);
/* Number or text at a path of JSON names, "layout/clusters"; ends the process when it is not there. */
uint64_t json_number(const char *text, const char *path);
char *json_text(const char *text, const char *path);

typedef struct {
    uint8_t *memory;
    const char *layout; /* a line for each field */
    size_t bytes;
    int fd;
} segment;
/* Open and map a segment as run.json says. */
segment segment_open(const char *run_file, const char *name, int writable);
void segment_close(segment *s);
/* Where a field lies; shape: its lengths, two at most. Ends the process when there is no such field. */
void *segment_field(const segment *s, const char *name, size_t shape[2]);

/* End the run with a line for a person. */
_Noreturn void place_fail(const char *what, const char *why);
#endif
