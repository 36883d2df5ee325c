/* Rows of a matrix that stay in a file and are read one at a time, around the page cache where the file system can: a
 * cached page would count as memory of the run. The last rows are kept. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "flash/reader.h"

struct np_row_file {
    int file;
    uint32_t alignment, row_bytes, rows;
    uint64_t offset;
    const uint32_t *checksums;
    uint64_t buffer_bytes; /* whole blocks that contain any row */
    uint8_t *buffers;      /* [NP_KEPT_ROWS][buffer_bytes] */
    uint32_t kept[NP_KEPT_ROWS]; /* the row in each buffer, plus 1; 0: none */
    uint32_t next;         /* the buffer that was filled least recently */
};

static uint64_t rounded_up(uint64_t bytes, uint64_t alignment)
{
    return (bytes + alignment - 1) / alignment * alignment;
}

np_row_file *np_row_file_open(const char *path, uint64_t offset, uint32_t row_bytes, uint32_t rows, const uint32_t *checksums, int *error)
{
    int direct;
    np_row_file *file = row_bytes && rows ? calloc(1, sizeof *file) : NULL;
    if (!file) {
        *error = row_bytes && rows ? ENOMEM : EINVAL;
        return NULL;
    }
    *file = (np_row_file){.row_bytes = row_bytes, .rows = rows, .offset = offset, .checksums = checksums};
    file->file = np_file_open(path, &direct, &file->alignment);
    if (file->file < 0) {
        *error = -file->file;
        free(file);
        return NULL;
    }
    file->buffer_bytes = rounded_up((uint64_t)row_bytes + NP_MAX_ALIGNMENT, NP_MAX_ALIGNMENT);
    file->buffers = aligned_alloc(NP_MAX_ALIGNMENT, NP_KEPT_ROWS * file->buffer_bytes);
    if (!file->buffers) {
        *error = ENOMEM;
        np_row_file_close(file);
        return NULL;
    }
    return file;
}

void np_row_file_close(np_row_file *file)
{
    if (!file)
        return;
    close(file->file);
    free(file->buffers);
    free(file);
}

const uint8_t *np_row_file_read(np_row_file *file, uint32_t row)
{
    if (row >= file->rows)
        return NULL;
    const uint64_t from = file->offset + (uint64_t)row * file->row_bytes, start = from / file->alignment * file->alignment;
    const size_t end = (size_t)(from - start) + file->row_bytes, wanted = (size_t)rounded_up(end, file->alignment);
    for (uint32_t n = 0; n < NP_KEPT_ROWS; n++)
        if (file->kept[n] == row + 1)
            return file->buffers + n * file->buffer_bytes + (from - start);
    uint8_t *buffer = file->buffers + file->next * file->buffer_bytes;
    size_t done = 0;
    file->kept[file->next] = 0;
    while (done < end) {
        const ssize_t bytes = pread(file->file, buffer + done, wanted - done, (off_t)(start + done));
        if (bytes < 0 && errno == EINTR)
            continue;
        if (bytes <= 0)
            return NULL;
        /* A short read may end between blocks; direct I/O can only go on at one. */
        const size_t now = done + (size_t)bytes, next = now >= end ? end : now / file->alignment * file->alignment;
        if (next == done)
            return NULL; /* the file ends here */
        done = next;
    }
    const uint8_t *bytes = buffer + (from - start);
    if (np_crc32c(0, bytes, file->row_bytes) != file->checksums[row])
        return NULL;
    file->kept[file->next] = row + 1;
    file->next = (file->next + 1) % NP_KEPT_ROWS;
    return bytes;
}

void np_row_checksums(const void *data, uint32_t row_bytes, uint32_t rows, uint32_t *checksums)
{
    for (uint32_t row = 0; row < rows; row++)
        checksums[row] = np_crc32c(0, (const uint8_t *)data + (size_t)row * row_bytes, row_bytes);
}
