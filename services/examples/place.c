#include "place.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void place_fail(const char *what, const char *why)
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

const char *place_fact(const char *name)
{
    char variable[64];
    snprintf(variable, sizeof variable, "NEURONPIPE_%s", name);
    const char *fact = getenv(variable);
    if (!fact)
        place_fail(variable, "not set; this program is started by neuronpipe --use");
    return fact;
}

char *place_read(const char *folder, const char *name, size_t *bytes)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END))
        place_fail(path, strerror(errno));
    const long size = ftell(file);
    char *text = malloc((size_t)size + 1);
    rewind(file);
    if (!text || fread(text, 1, (size_t)size, file) != (size_t)size)
        place_fail(path, "cannot be read to its end");
    text[size] = 0;
    if (bytes)
        *bytes = (size_t)size;
    fclose(file);
    return text;
}

/* ---- JSON, of files that were checked when they were written ------------------------------------------------------- */
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

static const char *json_find(const char *text, const char *path)
{
    const char *at = after_blanks(text);
    for (const char *name = path; *name;) {
        const size_t length = strcspn(name, "/");
        if (*at != '{')
            place_fail(path, "no such field");
        for (at = after_blanks(at + 1);;) {
            if (*at != '"')
                place_fail(path, "no such field");
            const char *key = at + 1;
            const int found = !strncmp(key, name, length) && key[length] == '"';
            at = after_blanks(after_text(at));
            at = after_blanks(at + (*at == ':'));
            if (found)
                break;
            at = after_blanks(after_value(at));
            at = after_blanks(at + (*at == ','));
        }
        name += length + (name[length] == '/');
    }
    return at;
}

uint64_t json_number(const char *text, const char *path)
{
    return strtoull(json_find(text, path), NULL, 10);
}

char *json_text(const char *text, const char *path)
{
    const char *at = json_find(text, path);
    const size_t length = (size_t)(after_value(at) - at);
    char *out = malloc(length + 1), *to = out;
    if (*at != '"' || !out)
        place_fail(path, "no text");
    for (size_t n = 1; n + 1 < length; n++) {
        if (at[n] == '\\') /* of the escapes only line ends and quotes occur here */
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
        place_fail(path, strerror(errno));
    s.memory = mmap(NULL, s.bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, s.fd, 0);
    if (s.memory == MAP_FAILED)
        place_fail(path, strerror(errno));
    if (memcmp(s.memory, "NPSEG1\0", 8) || s.memory[8] != 1)
        place_fail(name, "is no segment of version 1");
    return s;
}

void segment_close(segment *s)
{
    munmap(s->memory, s->bytes);
    s->memory = NULL;
}

void *segment_field(const segment *s, const char *name, size_t shape[2])
{
    for (const char *line = s->layout; *line; line += strcspn(line, "\n") + 1) {
        char field[64], type[8], lengths[64];
        size_t offset;
        if (sscanf(line, "%63s %7s %63s %zu", field, type, lengths, &offset) == 4 && !strcmp(field, name)) {
            if (shape) {
                shape[0] = shape[1] = 1;
                sscanf(lengths, "%zux%zu", &shape[0], &shape[1]);
            }
            return s->memory + offset;
        }
    }
    place_fail(name, "no such field in its segment");
}
