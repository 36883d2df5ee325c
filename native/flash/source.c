/* Experts that are read in place, from files of another format: where the rows of a cluster lie, and their conversion
 * to the types that the engine computes with.
 *
 * Rows are not aligned to pages, so each read has whole pages around them. A checksum is made by the first read of a
 * part whose rows could be converted, and later reads are compared with it. A file that was changed since the package
 * was made gives no clusters: its size and time of modification are compared after the bytes have arrived, and a write
 * changes the time before the bytes. (A write through a mapping may change it later; only the checksum finds that.) */
#include "flash/source.h"

#include <sys/stat.h>

#include "flash/reader.h"

enum { PAGE = 4096 };

static const np_source_matrix *matrix_of(const np_source *source, uint32_t number)
{
    const np_source_matrix *const all[NP_SOURCE_READS] = {&source->gate, &source->up, &source->down};
    return all[number];
}

/* The bytes of one expert's rows of a matrix in a run. */
static uint64_t stored_bytes(const np_source_matrix *matrix, uint32_t run)
{
    return (uint64_t)matrix->rows * np_gguf_row_bytes(matrix->encodings[run], matrix->columns);
}

/* The run that an expert belongs to. */
static uint32_t run_of(const np_source *source, uint32_t expert)
{
    uint32_t first = 0, end = source->runs;
    while (end - first > 1) {
        const uint32_t middle = first + (end - first) / 2;
        if (source->first_experts[middle] <= expert)
            first = middle;
        else
            end = middle;
    }
    return first;
}

/* The bytes from one expert's rows of a matrix to the next one's. */
static uint64_t stride_bytes(const np_source_matrix *matrix, uint32_t run)
{
    return matrix->strides && matrix->strides[run] ? matrix->strides[run] : stored_bytes(matrix, run);
}

/* The read of an expert's rows of one matrix. */
static np_source_read read_of(const np_source *source, const np_source_matrix *matrix, uint32_t id, uint32_t staged)
{
    const uint32_t run = run_of(source, id);
    const uint64_t bytes = stored_bytes(matrix, run);
    const uint64_t offset = matrix->offsets[run] + (id - source->first_experts[run]) * stride_bytes(matrix, run);
    const uint64_t first = offset / PAGE * PAGE, end = (offset + bytes + PAGE - 1) / PAGE * PAGE;
    return (np_source_read){.offset = first, .bytes = (uint32_t)(end - first), .skipped_bytes = (uint32_t)(offset - first),
                            .needed_bytes = (uint32_t)(offset + bytes - first), .staged = staged};
}

/* The most staging bytes that a part of a cluster needs. */
static uint64_t staging_bytes(const np_source *source, uint32_t part)
{
    uint64_t most = 0;
    for (uint32_t run = 0; run < source->runs; run++) {
        uint64_t all = 0;
        for (uint32_t i = 0; i < NP_SOURCE_READS; i++)
            if (matrix_of(source, i)->part == part)
                all += (stored_bytes(matrix_of(source, i), run) + PAGE - 1) / PAGE * PAGE + PAGE;
        most = all > most ? all : most;
    }
    return most;
}

/* True if a matrix lies in this part, its rows fit the slots, and every expert's rows lie within one of the files. */
static int is_matrix_valid(const np_source *source, const np_source_matrix *matrix, int part, const np_loader_part *config)
{
    const uint64_t quants = (uint64_t)matrix->rows * np_quant_bytes(matrix->type, matrix->columns);
    const uint64_t scales = (uint64_t)matrix->rows * np_scale_bytes(matrix->type, matrix->columns);
    if (matrix->part != (uint32_t)part || !quants || matrix->quants + quants > config->slot_bytes || matrix->scales + scales > config->slot_bytes)
        return 0;
    for (uint32_t run = 0; run < source->runs; run++) {
        const uint64_t offset = matrix->offsets[run], place = np_place_in_file(offset), bytes = stored_bytes(matrix, run);
        const uint32_t experts = source->first_experts[run + 1] - source->first_experts[run];
        if (!bytes || bytes > INT32_MAX || !np_gguf_fits(matrix->encodings[run], matrix->type) || np_file_number(offset) >= source->file_count)
            return 0;
        const uint64_t file_bytes = source->files[np_file_number(offset)].bytes;
        const uint64_t stride = stride_bytes(matrix, run);
        if (file_bytes >> NP_FILE_SHIFT || place > file_bytes || file_bytes - place < bytes || stride < bytes ||
            (file_bytes - place - bytes) / stride < experts - 1)
            return 0;
    }
    return 1;
}

/* True if every run has experts, and all runs together one for each cluster. */
static int are_runs_valid(const np_source *source, uint32_t cluster_count)
{
    if (!source->runs || source->first_experts[0])
        return 0;
    for (uint32_t run = 0; run < source->runs; run++)
        if (source->first_experts[run + 1] <= source->first_experts[run])
            return 0;
    return source->first_experts[source->runs] == cluster_count;
}

int np_is_source_valid(const np_loader_reading *reading, const np_loader_part *parts, const np_reader *reader)
{
    const np_source *source = reading->source;
    return reader->depth >= NP_SOURCE_READS && PAGE % reader->alignment == 0 && !reading->warm_up_reads && !parts[NP_VALUE].moved_bytes &&
           source->checksums && are_runs_valid(source, parts[NP_TRIGGER].cluster_count) &&
           source->file_count == reader->file_count && is_matrix_valid(source, &source->gate, NP_TRIGGER, &parts[NP_TRIGGER]) &&
           is_matrix_valid(source, &source->up, NP_VALUE, &parts[NP_VALUE]) && is_matrix_valid(source, &source->down, NP_VALUE, &parts[NP_VALUE]) &&
           staging_bytes(source, NP_TRIGGER) <= reading->most_read_bytes && staging_bytes(source, NP_VALUE) <= reading->most_read_bytes;
}

void np_plan_source_reads(const np_loader *loader, uint32_t entry, np_flight *flight)
{
    const np_source *source = loader->reading.source;
    uint32_t staged = 0;
    for (uint32_t i = 0; i < NP_SOURCE_READS; i++) {
        const np_source_matrix *matrix = matrix_of(source, i);
        flight->reads[i] = (np_source_read){0};
        if (entry & np_part_bit((int)matrix->part))
            flight->reads[i] = read_of(source, matrix, entry & NP_REQUEST_CLUSTER_MASK, staged);
        staged += flight->reads[i].bytes;
    }
}

uint64_t np_source_read_bytes(const np_loader *loader, uint32_t entry)
{
    np_flight flight;
    uint64_t bytes = 0;
    np_plan_source_reads(loader, entry, &flight);
    for (uint32_t i = 0; i < NP_SOURCE_READS; i++)
        bytes += flight.reads[i].bytes;
    return bytes;
}

static int is_unchanged(const np_loader *loader, uint32_t file)
{
    const np_source_file *expected = &loader->reading.source->files[file];
    struct stat status;
    return fstat(loader->reader->files[file], &status) == 0 && (uint64_t)status.st_size == expected->bytes &&
           (int64_t)status.st_mtim.tv_sec * 1000000000 + status.st_mtim.tv_nsec == expected->modified_ns;
}

/* True if no file of the flight was changed. */
static int are_files_unchanged(const np_loader *loader, const np_flight *flight)
{
    for (uint32_t i = 0; i < NP_SOURCE_READS; i++)
        if (flight->reads[i].bytes && !is_unchanged(loader, np_file_number(flight->reads[i].offset)))
            return 0;
    return 1;
}

/* The rows that a read brought. */
static const uint8_t *rows_of(const np_flight *flight, uint32_t number)
{
    return flight->staged + flight->reads[number].staged + flight->reads[number].skipped_bytes;
}

/* The checksum of a part's rows; never 0, which means that none is known. */
static uint32_t checksum_of(const np_source *source, const np_flight *flight, const np_claim *claim)
{
    uint32_t checksum = 0;
    for (uint32_t i = 0; i < NP_SOURCE_READS; i++)
        if (matrix_of(source, i)->part == claim->part)
            checksum = np_crc32c(checksum, rows_of(flight, i), flight->reads[i].needed_bytes - flight->reads[i].skipped_bytes);
    return checksum + (checksum == 0);
}

static int convert_part(const np_loader *loader, const np_flight *flight, const np_claim *claim)
{
    const np_source *source = loader->reading.source;
    const np_loader_part *config = &loader->parts[claim->part].config;
    uint8_t *slot = config->slots + (size_t)claim->slot * config->slot_bytes;
    for (uint32_t i = 0; i < NP_SOURCE_READS; i++) {
        const np_source_matrix *matrix = matrix_of(source, i);
        if (matrix->part == claim->part &&
            np_unpack_gguf_rows(matrix->encodings[run_of(source, claim->id)], rows_of(flight, i), matrix->rows, matrix->columns, matrix->type,
                                slot + matrix->quants, slot + matrix->scales) != NP_OK)
            return 0;
    }
    return 1;
}

void np_fill_from_source(const np_loader *loader, np_flight *flight)
{
    const np_source *source = loader->reading.source;
    flight->is_complete = are_files_unchanged(loader, flight);
    for (uint32_t i = 0; i < flight->claim_count; i++) {
        np_claim *claim = &flight->claims[i];
        uint32_t *known = &source->checksums[2 * (size_t)claim->id + claim->part];
        const uint32_t checksum = flight->is_complete ? checksum_of(source, flight, claim) : 0;
        claim->is_valid = flight->is_complete && (!*known || *known == checksum) && convert_part(loader, flight, claim);
        if (claim->is_valid)
            *known = checksum;
    }
}
