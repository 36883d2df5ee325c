/* Huge pages under the weight slots. A huge page is made before its first slot is filled, when it costs less than the
 * page faults that it spares. It is made only where all of its slots have been granted, so that no limit is exceeded: a
 * run that returns memory keeps the slots below an end, which lies within a huge page.
 *
 * Two threads fill slots and make huge pages, each one that the other has not begun: clearing them takes most of the time,
 * above all where a hypervisor has to provide the memory. Returning memory excludes both: otherwise a page that is being
 * made could bring back what was just returned. */
#include "flash/slot_pages.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int np_slot_pages_create(np_slot_pages *pages, const np_loader_part *config)
{
    *pages = (np_slot_pages){.huge_bytes = config->slots_file < 0 ? 0 : np_huge_page_bytes()};
    pthread_rwlock_init(&pages->lock, NULL);
    if (!pages->huge_bytes)
        return 1;
    const size_t before = (uintptr_t)config->slots % pages->huge_bytes;
    pages->tried = calloc((before + (size_t)config->slot_count * config->slot_bytes) / pages->huge_bytes + 1, sizeof *pages->tried);
    return pages->tried != NULL;
}

void np_slot_pages_destroy(np_slot_pages *pages)
{
    pthread_rwlock_destroy(&pages->lock);
    free(pages->tried);
}

void np_slot_pages_grant(np_slot_pages *pages, const np_loader_part *config, uint32_t slot)
{
    const size_t end = ((size_t)slot + 1) * config->slot_bytes;
    if (end > pages->granted_bytes)
        __atomic_store_n(&pages->granted_bytes, end, __ATOMIC_RELAXED); /* the other thread only fills slots that were granted before */
}

/* Make huge page number n, counted from the multiple of its size at or below the first slot. */
static void make_huge_page(np_slot_pages *pages, const np_loader_part *config, size_t n)
{
    const size_t before = (uintptr_t)config->slots % pages->huge_bytes; /* of the first huge page, not slots of this part */
    const size_t end = (n + 1) * pages->huge_bytes - before;
    if (n * pages->huge_bytes < before || end > __atomic_load_n(&pages->granted_bytes, __ATOMIC_RELAXED))
        return;
    pthread_rwlock_rdlock(&pages->lock);
    if (end <= __atomic_load_n(&pages->granted_bytes, __ATOMIC_RELAXED) && !__atomic_exchange_n(&pages->tried[n], 1, __ATOMIC_RELAXED)) {
        const int result = np_memory_collapse(config->slots + (end - pages->huge_bytes), pages->huge_bytes);
        if (result != NP_OK && result != -EAGAIN) /* the next would fail as well, after the kernel has searched for memory */
            __atomic_store_n(&pages->is_refused, 1, __ATOMIC_RELAXED);
    }
    pthread_rwlock_unlock(&pages->lock);
}

void np_slot_pages_prepare(np_slot_pages *pages, const np_loader_part *config, uint32_t slot)
{
    if (!pages->huge_bytes || __atomic_load_n(&pages->is_refused, __ATOMIC_RELAXED))
        return;
    const size_t first = (uintptr_t)config->slots % pages->huge_bytes + (size_t)slot * config->slot_bytes;
    const size_t last = first + config->slot_bytes - 1;
    for (size_t n = first / pages->huge_bytes; n <= last / pages->huge_bytes; n++)
        if (!__atomic_load_n(&pages->tried[n], __ATOMIC_RELAXED))
            make_huge_page(pages, config, n);
}

int np_slot_pages_trim(np_slot_pages *pages, const np_loader_part *config, uint32_t first_slot)
{
    const size_t from = (size_t)first_slot * config->slot_bytes, all = (size_t)config->slot_count * config->slot_bytes;
    pthread_rwlock_wrlock(&pages->lock);
    if (pages->granted_bytes > from)
        __atomic_store_n(&pages->granted_bytes, from, __ATOMIC_RELAXED);
    if (pages->mapped_bytes > from)
        pages->mapped_bytes = from;
    const int result = np_file_give_back(config->slots_file, config->slots_file_offset + from, all - from);
    if (pages->huge_bytes) {
        const size_t before = (uintptr_t)config->slots % pages->huge_bytes, end = before + all;
        for (size_t n = (before + from + pages->huge_bytes - 1) / pages->huge_bytes; n * pages->huge_bytes < end; n++)
            __atomic_store_n(&pages->tried[n], 0, __ATOMIC_RELAXED);
    }
    pthread_rwlock_unlock(&pages->lock);
    return result == NP_OK ? NP_OK : NP_E_IO;
}

int np_slot_pages_map(np_slot_pages *pages, const np_loader_part *config, size_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    if (config->slots_file < 0 || pages->mapped_bytes >= pages->granted_bytes || pages->cannot_map)
        return 0;
    const size_t left = pages->granted_bytes - pages->mapped_bytes;
    bytes = bytes < left ? bytes : left;
    const uint32_t first = (uint32_t)(pages->mapped_bytes / config->slot_bytes);
    const uint32_t last = (uint32_t)((pages->mapped_bytes + bytes - 1) / config->slot_bytes);
    for (uint32_t slot = first; slot <= last; slot++)
        np_slot_pages_prepare(pages, config, slot);
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), place = (uintptr_t)config->slots + pages->mapped_bytes;
    const uintptr_t from = place / page * page;
    pages->cannot_map = madvise((void *)from, place + bytes - from, MADV_POPULATE_WRITE) != 0;
    pages->mapped_bytes += bytes;
    return 1;
#else
    (void)pages, (void)config, (void)bytes;
    return 0;
#endif
}
