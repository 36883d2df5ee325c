#include "client/run_context.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef F_ADD_SEALS
#define F_ADD_SEALS 1033
#define F_GET_SEALS 1034
#define F_SEAL_SEAL 1
#define F_SEAL_WRITE 8
#endif

enum { HEADER_BYTES = 4096 };

void run_fail(const char *what, const char *why)
{
    char path[512];
    snprintf(path, sizeof path, "%s/failure", getenv("NEURONPIPE_RUN") ? getenv("NEURONPIPE_RUN") : ".");
    FILE *file = fopen(path, "w");
    if (file) {
        fprintf(file, "%s: %s", what, why);
        fclose(file);
    }
    fprintf(stderr, "%s: %s\n", what, why);
    exit(2);
}

const char *run_environment(const char *name)
{
    char variable[64];
    snprintf(variable, sizeof variable, "NEURONPIPE_%s", name);
    const char *text = getenv(variable);
    if (!text)
        run_fail(variable, "not set; this program is started by neuronpipe --use");
    return text;
}

char *run_read_file(const char *folder, const char *name, size_t *bytes)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END))
        run_fail(path, strerror(errno));
    const long size = ftell(file);
    char *text = malloc((size_t)size + 1);
    rewind(file);
    if (!text || fread(text, 1, (size_t)size, file) != (size_t)size)
        run_fail(path, "cannot be read to its end");
    text[size] = 0;
    if (bytes)
        *bytes = (size_t)size;
    fclose(file);
    return text;
}

/* ---- JSON: files of the run, validated when they were written ------------------------------------------------------- */
static const char *after_blanks(const char *at)
{
    return at + strspn(at, " \t\r\n");
}

static const char *after_text(const char *at)
{
    for (at++; *at && *at != '"'; at++)
        if (*at == '\\' && at[1])
            at++;
    return *at ? at + 1 : at;
}

static const char *after_value(const char *at)
{
    if (*at == '"')
        return after_text(at);
    if (*at != '{' && *at != '[')
        return at + strcspn(at, ",]} \t\r\n");
    int depth = 0;
    do {
        if (*at == '"') {
            at = after_text(at);
            continue;
        }
        depth += (*at == '{' || *at == '[') - (*at == '}' || *at == ']');
        at++;
    } while (depth && *at);
    return at;
}

/* NULL if there is no such field. */
static const char *json_look(const char *text, const char *path)
{
    const char *at = after_blanks(text);
    for (const char *name = path; *name;) {
        const size_t length = strcspn(name, "/");
        if (*at != '{')
            return NULL;
        for (at = after_blanks(at + 1);;) {
            if (*at != '"')
                return NULL;
            const char *key = at + 1;
            const int matches = !strncmp(key, name, length) && key[length] == '"';
            at = after_blanks(after_text(at));
            at = after_blanks(at + (*at == ':'));
            if (matches)
                break;
            at = after_blanks(after_value(at));
            at = after_blanks(at + (*at == ','));
        }
        name += length + (name[length] == '/');
    }
    return at;
}

static const char *json_find(const char *text, const char *path)
{
    const char *at = json_look(text, path);
    if (!at)
        run_fail(path, "no such field");
    return at;
}

uint64_t json_number(const char *text, const char *path)
{
    return strtoull(json_find(text, path), NULL, 10);
}

double json_real(const char *text, const char *path)
{
    return strtod(json_find(text, path), NULL);
}

int json_truth(const char *text, const char *path)
{
    return *json_find(text, path) == 't';
}

int json_has(const char *text, const char *path)
{
    const char *at = json_look(text, path);
    return at && *at != 'n';
}

const char *json_item(const char *text, const char *path, size_t number)
{
    const char *at = json_find(text, path);
    if (*at != '[')
        run_fail(path, "no array");
    for (at = after_blanks(at + 1); *at && *at != ']' && number--;) {
        at = after_blanks(after_value(at));
        at = after_blanks(at + (*at == ','));
    }
    return *at && *at != ']' ? at : NULL;
}

char *json_text(const char *text, const char *path)
{
    const char *at = json_find(text, path);
    const size_t length = (size_t)(after_value(at) - at);
    char *out = malloc(length + 1), *to = out;
    if (*at != '"' || !out)
        run_fail(path, "no text");
    for (size_t n = 1; n + 1 < length; n++) {
        if (at[n] == '\\') /* only line ends, quotes and backslashes are escaped in these files */
            *to++ = at[++n] == 'n' ? '\n' : at[n];
        else
            *to++ = at[n];
    }
    *to = 0;
    return out;
}

/* ---- segments ------------------------------------------------------------------------------------------------------ */
segment segment_open(const char *run_file, const char *name, int writable)
{
    char path[128];
    segment s = {0};
    snprintf(path, sizeof path, "segments/%s/fd", name);
    const uint64_t fd = json_number(run_file, path);
    snprintf(path, sizeof path, "segments/%s/total_bytes", name);
    s.bytes = json_number(run_file, path);
    snprintf(path, sizeof path, "segments/%s/layout", name);
    s.layout = json_text(run_file, path);
    snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (unsigned long long)json_number(run_file, "supervisor_pid"),
             (unsigned long long)fd);
    s.fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (s.fd < 0)
        run_fail(path, strerror(errno));
    s.memory = mmap(NULL, s.bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, s.fd, 0);
    if (s.memory == MAP_FAILED)
        run_fail(path, strerror(errno));
    if (s.bytes < HEADER_BYTES || memcmp(s.memory, "NPSEG1\0", 8) || s.memory[8] != 1 || memcmp(s.memory + 24, &s.bytes, sizeof s.bytes))
        run_fail(name, "is no segment of version 1 and of this size");
    return s;
}

void segment_close(segment *s)
{
    munmap(s->memory, s->bytes);
    s->memory = NULL;
}

int segment_is_sealed(const segment *s)
{
    return fcntl(s->fd, F_GET_SEALS) & F_SEAL_WRITE;
}

void segment_seal(const segment *s)
{
    if (fcntl(s->fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SEAL) < 0)
        run_fail("fixed tensors", strerror(errno));
}

typedef struct {
    char name[64], type[8];
    size_t lengths[8], count, offset, bytes;
} field;

/* Parse the next line of a layout. Returns 0 at its end. */
static int take_field(const char **line, field *f)
{
    char lengths[128];
    *f = (field){.bytes = 1};
    if (!**line)
        return 0;
    if (sscanf(*line, "%63s %7s %127s %zu", f->name, f->type, lengths, &f->offset) != 4)
        run_fail("layout", "a line cannot be read");
    f->bytes = strtoul(f->type + 1, NULL, 10) / 8;
    for (char *at = lengths; *at && f->count < 8; at += *at == 'x') {
        f->lengths[f->count] = strtoull(at, &at, 10);
        if (*at && *at != 'x')
            run_fail(f->name, "its lengths cannot be read");
        if (__builtin_mul_overflow(f->bytes, f->lengths[f->count++], &f->bytes))
            run_fail(f->name, "is too large");
    }
    *line += strcspn(*line, "\n");
    *line += **line == '\n';
    return 1;
}

static field find_field(const segment *s, const char *name)
{
    field f;
    for (const char *line = s->layout; take_field(&line, &f);)
        if (!strcmp(f.name, name)) {
            if (f.offset > s->bytes || f.bytes > s->bytes - f.offset)
                run_fail(name, "lies outside of its segment");
            return f;
        }
    run_fail(name, "no such field in its segment");
}

segment segment_private(const char *run_file, const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "private/%s", name);
    segment s = {.layout = json_text(run_file, path), .fd = -1};
    field f;
    for (const char *line = s.layout; take_field(&line, &f);)
        s.bytes = f.offset + f.bytes > s.bytes ? f.offset + f.bytes : s.bytes;
    s.memory = mmap(NULL, s.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s.memory == MAP_FAILED)
        run_fail(path, strerror(errno));
    return s;
}

void *segment_field(const segment *s, const char *name, size_t shape[2])
{
    const field f = find_field(s, name);
    for (size_t n = 0; shape && n < 2; n++)
        shape[n] = n < f.count ? f.lengths[n] : 1;
    return s->memory + f.offset;
}

size_t segment_field_bytes(const segment *s, const char *name)
{
    return find_field(s, name).bytes;
}
