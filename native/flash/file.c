/* Opening the file: direct I/O if it works, and the alignment that it needs. */
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/stat.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "flash/reader.h"

/* The alignment that the file system reports. 0: no direct I/O. NP_MAX_ALIGNMENT if it does not report any (before Linux
 * 6.1, or statx is not allowed). */
static uint32_t reported_alignment(int file)
{
#ifdef STATX_DIOALIGN
    struct statx status = {0};
    if (syscall(SYS_statx, file, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN)) {
        if (status.stx_dio_offset_align == 0)
            return 0;
        return status.stx_dio_offset_align > status.stx_dio_mem_align ? status.stx_dio_offset_align : status.stx_dio_mem_align;
    }
#endif
    return NP_MAX_ALIGNMENT;
}

/* Files in memory have no device to read from. Since Linux 6.6 tmpfs accepts O_DIRECT nevertheless, and copies. */
static int is_in_memory(int file)
{
    struct statfs system;
    if (fstatfs(file, &system) != 0)
        return 0;
    const uint32_t magic = (uint32_t)system.f_type;
    return magic == TMPFS_MAGIC || magic == RAMFS_MAGIC;
}

/* Read the first page: some file systems accept O_DIRECT at open and refuse the read. Returns 0 or errno. */
static int try_read(int file)
{
    void *page = aligned_alloc(NP_MAX_ALIGNMENT, NP_MAX_ALIGNMENT);
    if (!page)
        return ENOMEM;
    ssize_t bytes;
    do
        bytes = pread(file, page, NP_MAX_ALIGNMENT, 0);
    while (bytes < 0 && errno == EINTR);
    const int error = bytes < 0 ? errno : 0;
    free(page);
    return error;
}

int np_file_open(const char *path, int *direct, uint32_t *alignment)
{
    int file = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (file >= 0) {
        *direct = 1;
        *alignment = reported_alignment(file);
        const int usable = *alignment >= 1 && *alignment <= NP_MAX_ALIGNMENT && (*alignment & (*alignment - 1)) == 0;
        if (usable && !is_in_memory(file) && try_read(file) == 0)
            return file;
        close(file);
    } else if (errno != EINVAL) {
        return -errno;
    }
    *direct = 0;
    *alignment = 1;
    file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return -errno;
    const int error = try_read(file); /* open succeeds for a directory */
    if (error) {
        close(file);
        return -error;
    }
    return file;
}
