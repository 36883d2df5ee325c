/* Process settings: parent death signal, name, the C library's memory. */
#include "neuronpipe.h"

#include <malloc.h>
#include <signal.h>
#include <sys/prctl.h>
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
