/* Huge pages under the slots: where all slots have been granted, with the right bytes, and no more memory than granted. */
#define BUNDLE_TRIGGER_BYTES (128 << 10)
#define BUNDLE_VALUE_BYTES (512 << 10)
#define BUNDLE_CLUSTERS 20
#define BUNDLE_SLOTS 20
#define BUNDLE_SLOTS_FILE_OFFSET (3 << 20) /* so that a huge page lies in both parts */
#include <sys/stat.h>

#include "bundles.h"

static int makes_huge_pages;
static size_t huge;

/* Bytes of this process's mappings of memory files that are huge pages. */
static size_t huge_mapped_bytes(void)
{
    FILE *file = fopen("/proc/self/smaps", "r");
    REQUIRE(file != NULL);
    char line[256];
    size_t sum = 0, kilobytes;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "ShmemPmdMapped: %zu kB", &kilobytes) == 1)
            sum += kilobytes << 10;
    fclose(file);
    return sum;
}

static size_t resident_bytes(int descriptor)
{
    struct stat status;
    REQUIRE(fstat(descriptor, &status) == 0);
    return (size_t)status.st_blocks * 512;
}

/* Bytes of whole huge pages among the first slots of the value part. */
static size_t whole_huge_bytes(uint32_t slot_count)
{
    const uintptr_t first = (uintptr_t)slots[1], end = first + (size_t)slot_count * slot_bytes[1];
    const uintptr_t from = (first + huge - 1) / huge * huge;
    return end < from ? 0 : (end - from) / huge * huge;
}

static void test_memory_keeps_its_bytes_in_huge_pages(void)
{
    const size_t bytes = 3 * huge + 4096;
    const int descriptor = memfd_create("memory", 0);
    REQUIRE(descriptor >= 0 && ftruncate(descriptor, (off_t)bytes) == 0);
    uint8_t *memory = np_memory_map(descriptor, bytes, 1), *reader = np_memory_map(descriptor, bytes, 0);
    REQUIRE(memory && reader && (uintptr_t)memory % huge == 0 && (uintptr_t)reader % huge == 0);
    for (size_t i = 0; i < bytes; i += 1021)
        memory[i] = (uint8_t)(i / 1021);
    const int result = np_memory_collapse(memory + 1, bytes - 1); /* the first is not whole */
    makes_huge_pages = result == NP_OK && huge_mapped_bytes() >= 2 * huge;
    REQUIRE(result == NP_OK || result < 0);
    for (size_t i = 0; i < bytes; i += 1021)
        REQUIRE(memory[i] == (uint8_t)(i / 1021) && reader[i] == memory[i]);
    if (makes_huge_pages) {
        REQUIRE_EQUAL(np_memory_collapse(memory, bytes), NP_OK);
        REQUIRE(huge_mapped_bytes() >= 3 * huge);
    }
    REQUIRE_EQUAL(np_memory_unmap(memory, bytes), NP_OK);
    REQUIRE_EQUAL(np_memory_unmap(reader, bytes), NP_OK);
    close(descriptor);
}

static void test_what_cannot_be_mapped_is_refused(void)
{
    REQUIRE(np_memory_map(-1, 4096, 0) == NULL);
    REQUIRE(np_memory_map(-1, 4 * (size_t)(2 << 20), 0) == NULL);
    REQUIRE(np_memory_map(file, 0, 0) == NULL);
    REQUIRE(np_memory_map(file, SIZE_MAX, 0) == NULL);
}

static void unmap_slots(void)
{
    REQUIRE_EQUAL(np_memory_unmap(slots[0], SLOTS_FILE_OFFSET + (size_t)SLOTS * slot_bytes[1]), NP_OK);
    close(slots_file);
    slots_file = -1;
    slots[0] = slots[1] = NULL;
}

static void load(np_loader *loader, uint32_t first, uint32_t count)
{
    for (uint32_t id = first; id < first + count; id++)
        REQUIRE_EQUAL(np_loader_request(loader, NP_REQUEST_TRIGGER | NP_REQUEST_VALUE, &id, 1, 0, 0), 1);
    run_dry(loader);
    for (uint32_t id = first; id < first + count; id++)
        for (int part = 0; part < 2; part++)
            require_present(part, id);
}

static void test_slots_lie_in_huge_pages_where_all_are_granted(void)
{
    map_slots();
    np_loader *loader = start("threads");
    for (int part = 0; part < 2; part++)
        grant(loader, part, 0, SLOTS);
    load(loader, 0, SLOTS);
    if (makes_huge_pages)
        REQUIRE(huge_mapped_bytes() >= whole_huge_bytes(SLOTS) && whole_huge_bytes(SLOTS) >= 3 * huge);
    stop(loader);
    unmap_slots();
}

static void test_memory_beyond_the_last_granted_slot_is_not_used(void)
{
    map_slots();
    np_loader *loader = start("threads");
    for (uint32_t slot = 0; slot < 14; slot++) { /* one after the other: each is filled before the next is granted */
        for (int part = 0; part < 2; part++)
            grant(loader, part, slot, 1);
        load(loader, slot, 1);
        REQUIRE(resident_bytes(slots_file) <= (slot + 1) * (size_t)(slot_bytes[0] + slot_bytes[1]) + 2 * 4096);
    }
    stop(loader);
    unmap_slots();
}

static void test_memory_that_was_returned_comes_back_with_its_slots(void)
{
    map_slots();
    np_loader *loader = start("threads");
    for (int part = 0; part < 2; part++)
        grant(loader, part, 0, SLOTS);
    load(loader, 0, SLOTS);
    enum { STAY = 9 };
    for (int part = 0; part < 2; part++)
        np_slots_vacate(words[part], CLUSTERS, STAY, NULL, 0);
    const size_t before = resident_bytes(slots_file);
    REQUIRE_EQUAL(np_loader_trim(loader, 1, STAY), NP_OK);
    REQUIRE(before - resident_bytes(slots_file) >= (SLOTS - STAY) * (size_t)slot_bytes[1] - 4096);
    const size_t trimmed = resident_bytes(slots_file);
    for (uint32_t id = 0; id < CLUSTERS; id++)
        if (words[1][id] != NP_ENTRY_ABSENT)
            require_present(1, id);
    grant(loader, 0, STAY, SLOTS - STAY);
    uint32_t granted = STAY;
    for (uint32_t id = 0; id < CLUSTERS; id++)
        if (words[1][id] == NP_ENTRY_ABSENT) {
            grant(loader, 1, granted++, 1);
            load(loader, id, 1);
            REQUIRE(resident_bytes(slots_file) <= trimmed + (granted - STAY) * (size_t)slot_bytes[1] + 2 * 4096);
        }
    REQUIRE_EQUAL(granted, SLOTS);
    if (makes_huge_pages) /* but for the one that was divided */
        REQUIRE(huge_mapped_bytes() >= whole_huge_bytes(SLOTS) - huge);
    stop(loader);
    unmap_slots();
}

int main(void)
{
    huge = np_huge_page_bytes() ? np_huge_page_bytes() : 2 << 20;
    write_bundles();
    if (np_huge_page_bytes())
        test_memory_keeps_its_bytes_in_huge_pages();
    test_what_cannot_be_mapped_is_refused();
    test_slots_lie_in_huge_pages_where_all_are_granted();
    test_memory_beyond_the_last_granted_slot_is_not_used();
    test_memory_that_was_returned_comes_back_with_its_slots();
    remove_bundles();
    if (!makes_huge_pages)
        printf("  huge pages, of which this system makes none: not tested\n");
    printf("slot pages: all passed\n");
    return 0;
}
