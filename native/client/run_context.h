/* What a process learns about its run, from SPEC.md sections 2 and 10: environment variables, JSON files, shared memory
 * segments. Errors end the run with one line for the user, because none of them can be repaired by starting the process
 * again. */
#ifndef NEURONPIPE_RUN_CONTEXT_H
#define NEURONPIPE_RUN_CONTEXT_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
#define RUN_NORETURN [[noreturn]]
extern "C" {
#else
#define RUN_NORETURN _Noreturn
#endif

/* End the run: write "what: why" to the run's failure file and to stderr, and exit. */
RUN_NORETURN void run_fail(const char *what, const char *why);
/* The environment variable NEURONPIPE_<name>. Ends the run if it is not set. */
const char *run_environment(const char *name);
/* The content of folder/name, followed by a zero byte; the caller frees it. Ends the run if the file cannot be read. */
char *run_read_file(const char *folder, const char *name, size_t *bytes);

/* The value at a path of names such as "layout/clusters"; "" is the document itself. Ends the run if there is no such
 * field. The parser expects valid JSON: the files of a run were validated when they were written. */
uint64_t json_number(const char *text, const char *path);
double json_real(const char *text, const char *path);
int json_truth(const char *text, const char *path);
char *json_text(const char *text, const char *path); /* the caller frees it */
int json_has(const char *text, const char *path);    /* 1 if the field exists and is not null */
/* An item of the array at this path, as a document for these functions; NULL behind the last item. */
const char *json_item(const char *text, const char *path, size_t number);

typedef struct {
    uint8_t *memory;
    const char *layout; /* one line per field: name, type, lengths, offset */
    size_t bytes;
    int fd;
} segment;
/* Open and map a shared memory segment by its entry in run.json. */
segment segment_open(const char *run_file, const char *name, int writable);
void segment_close(segment *s);
/* A sealed segment's content is final. segment_seal needs the mapping closed before. */
int segment_is_sealed(const segment *s);
void segment_seal(const segment *s);
/* Memory of this process only, with the layout that run.json has under `private`. */
segment segment_private(const char *run_file, const char *name);
/* The address of a field; shape: its first two lengths, or NULL. Ends the run if there is no such field or it does not
 * fit the segment. */
void *segment_field(const segment *s, const char *name, size_t shape[2]);
size_t segment_field_bytes(const segment *s, const char *name);
#ifdef __cplusplus
}
#endif
#endif
