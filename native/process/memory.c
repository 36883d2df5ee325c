/* Mappings of memory files, in huge pages where the kernel makes them.
 *
 * Weights are read once per token, more of them than any TLB covers: from pages of 4 KiB two threads of a Xeon 6 read
 * rows of q4 at 13 to 18 GB/s, from huge pages at 24. A memory file gets huge pages by itself only where the administrator
 * has set shmem_enabled. MADV_COLLAPSE (Linux 6.1) needs no setting. A stretch that holds one page becomes a huge page ten
 * times as fast as its 512 pages are touched (Zen 5; three times on the Xeon); a full one has to be copied, which takes about as
 * long as touching. */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "neuronpipe.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum {
    USUAL_PAGE = 4096,
    USUAL_HUGE_PAGE = 2 << 20,   /* of USUAL_PAGE, where the kernel does not show its size */
    LARGEST_HUGE_PAGE = 4 << 20, /* with pages of 16 or 64 KiB they have 32 or 512 MiB, too coarse for slots */
};

size_t np_huge_page_bytes(void)
{
    static size_t known; /* each thread finds the same */
    size_t bytes = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (bytes)
        return bytes - 1;
    unsigned long long shown = sysconf(_SC_PAGESIZE) == USUAL_PAGE ? USUAL_HUGE_PAGE : 0;
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "re");
    if (file) {
        if (fscanf(file, "%llu", &shown) != 1)
            shown = 0;
        fclose(file);
    }
    bytes = shown <= LARGEST_HUGE_PAGE && (shown & (shown - 1)) == 0 ? (size_t)shown : 0;
    __atomic_store_n(&known, bytes + 1, __ATOMIC_RELAXED);
    return bytes;
}

void *np_memory_map(int32_t file, size_t bytes, int32_t is_writable)
{
    const int protection = is_writable ? PROT_READ | PROT_WRITE : PROT_READ;
    const size_t huge = np_huge_page_bytes();
    if (bytes == 0 || bytes > SIZE_MAX / 2) {
        errno = EINVAL;
        return NULL;
    }
    if (!huge || bytes < huge) {
        void *memory = mmap(NULL, bytes, protection, MAP_SHARED, file, 0);
        return memory == MAP_FAILED ? NULL : memory;
    }
    /* Addresses for the mapping and for moving it to a multiple of `huge`; what is not needed is given back. */
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), mapped = (bytes + page - 1) / page * page;
    uint8_t *reserved = mmap(NULL, mapped + huge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED)
        return NULL;
    const size_t before = (huge - (uintptr_t)reserved % huge) % huge;
    void *memory = mmap(reserved + before, bytes, protection, MAP_SHARED | MAP_FIXED, file, 0);
    if (memory == MAP_FAILED) {
        const int error = errno;
        munmap(reserved, mapped + huge);
        errno = error;
        return NULL;
    }
    if (before)
        munmap(reserved, before);
    munmap(reserved + before + mapped, huge - before);
    return memory;
}

int np_memory_unmap(void *memory, size_t bytes)
{
    return munmap(memory, bytes) == 0 ? NP_OK : -errno;
}

int np_memory_collapse(void *memory, size_t bytes)
{
    const size_t huge = np_huge_page_bytes();
    if (!huge)
        return -ENOSYS;
    uint8_t *const end = (uint8_t *)memory + bytes;
    int result = NP_OK;
    for (uint8_t *at = (uint8_t *)memory + (huge - (uintptr_t)memory % huge) % huge; at < end && (size_t)(end - at) >= huge; at += huge) {
        __atomic_fetch_or(at, 0, __ATOMIC_RELAXED); /* the kernel collapses no stretch without a page */
        if (madvise(at, huge, MADV_COLLAPSE) == 0)
            continue;
        result = -errno;
        if (errno != EAGAIN) /* EAGAIN: a page of this stretch was in use */
            break;
    }
    return result;
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
