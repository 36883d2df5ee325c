/* Process settings: parent death signal, name, memory. */
#include "neuronpipe.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int np_process_die_with(int32_t parent)
{
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0)
        return NP_E_ARGUMENT;
    if (getppid() != (pid_t)parent) /* the parent died before the request was in place */
        _exit(1);
    return NP_OK;
}

int np_process_name(const char *name)
{
    return prctl(PR_SET_NAME, name, 0, 0, 0) == 0 ? NP_OK : NP_E_ARGUMENT;
}

int np_memory_advise_huge(void *memory, size_t bytes)
{
#ifdef MADV_HUGEPAGE
    return madvise(memory, bytes, MADV_HUGEPAGE) == 0 ? NP_OK : -errno;
#else
    (void)memory, (void)bytes;
    return -ENOSYS;
#endif
}

int np_memory_lock(const void *memory, size_t bytes)
{
#ifdef SYS_mlock2
    enum { ON_FAULT = 1 }; /* MLOCK_ONFAULT; some C libraries do not define it */
    return syscall(SYS_mlock2, memory, bytes, ON_FAULT) == 0 ? NP_OK : -errno;
#else
    (void)memory, (void)bytes;
    return -ENOSYS;
#endif
}

int np_file_give_back(int32_t file, uint64_t offset, uint64_t bytes)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    const uint64_t first = (offset + page - 1) / page * page, end = (offset + bytes) / page * page;
    if (first >= end)
        return NP_OK;
    return fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)first, (off_t)(end - first)) == 0 ? NP_OK : -errno;
}

void np_memory_give_back(void)
{
#if defined(__GLIBC__)
    malloc_trim(0);
#elif defined(M_PURGE) /* Android */
    mallopt(M_PURGE, 0);
#endif
}

void np_memory_map_from(size_t bytes)
{
#if defined(__GLIBC__)
    mallopt(M_MMAP_THRESHOLD, bytes < INT32_MAX ? (int)bytes : INT32_MAX);
#else
    (void)bytes;
#endif
}
