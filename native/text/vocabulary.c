/* Reads the tables of a byte-pair encoding from a tokenizer.json. The file is a stranger's: its sizes are counted before
 * memory is taken. No entry of a hash table is more than MAX_PROBES slots behind its first one, so that each look-up
 * takes bounded time; a file in which an entry would be is refused. */
#include "vocabulary.h"

#include <stdlib.h>
#include <string.h>

#include "json_scan.h"

enum {
    MAX_ID = (1 << 24) - 1,
    MAX_NAME_BYTES = 1 << 16,
    MAX_PROBES = 256 /* a third of the slots is empty: a million entries that are not chosen to collide need fewer */
};

typedef struct {
    np_json vocabulary, merges; /* at the values of the fields of `model`, once found */
} fields;

static uint64_t hash_bytes(const uint8_t *bytes, uint32_t length)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (uint32_t i = 0; i < length; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash * 0x9e3779b97f4a7c15u;
}

static uint64_t hash_pair(uint32_t left, uint32_t right)
{
    uint64_t hash = ((uint64_t)left << 32 | right) * 0x9e3779b97f4a7c15u;
    return (hash ^ hash >> 32) * 0xd6e8feb86659fd93u;
}

static uint64_t first_slot(uint64_t hash, uint64_t slots) { return (hash >> 32) * slots >> 32; }

static int is_name(const np_vocabulary *v, uint32_t id, const uint8_t *name, uint32_t length)
{
    return v->lengths[id] == length && !memcmp(v->names + v->starts[id], name, length);
}

uint32_t np_vocabulary_token(const np_vocabulary *v, const uint8_t *name, uint32_t length)
{
    uint64_t slot = first_slot(hash_bytes(name, length), v->name_slots);
    for (int probes = 0; v->by_name[slot] && probes <= MAX_PROBES; probes++, slot = slot + 1 < v->name_slots ? slot + 1 : 0)
        if (is_name(v, v->by_name[slot] - 1, name, length))
            return v->by_name[slot] - 1;
    return NP_NO_TOKEN;
}

static int is_pair(const np_merge *merge, uint32_t left, uint32_t right) { return merge->left == left && merge->right == right; }

uint32_t np_vocabulary_rank(const np_vocabulary *v, uint32_t left, uint32_t right)
{
    uint64_t slot = first_slot(hash_pair(left, right), v->pair_slots);
    for (int probes = 0; v->by_pair[slot] && probes <= MAX_PROBES; probes++, slot = slot + 1 < v->pair_slots ? slot + 1 : 0)
        if (is_pair(&v->by_rank[v->by_pair[slot] - 1], left, right))
            return v->by_pair[slot] - 1;
    return NP_NO_MERGE;
}

/* Add a token under its name. Returns 0 if the name or the id is taken, or names collide. */
static int add_name(np_vocabulary *v, uint32_t id, const uint8_t *name, uint32_t length)
{
    uint64_t slot = first_slot(hash_bytes(name, length), v->name_slots);
    for (int probes = 0; v->by_name[slot]; slot = slot + 1 < v->name_slots ? slot + 1 : 0)
        if (++probes > MAX_PROBES || is_name(v, v->by_name[slot] - 1, name, length))
            return 0;
    if (v->lengths[id])
        return 0;
    v->by_name[slot] = id + 1;
    v->lengths[id] = length;
    return 1;
}

/* Add a merge; of two with the same pair the later one counts. Returns 0 if pairs collide. */
static int add_merge(np_vocabulary *v, uint32_t rank, np_merge merge)
{
    uint64_t slot = first_slot(hash_pair(merge.left, merge.right), v->pair_slots);
    for (int probes = 0; v->by_pair[slot]; slot = slot + 1 < v->pair_slots ? slot + 1 : 0) {
        if (is_pair(&v->by_rank[v->by_pair[slot] - 1], merge.left, merge.right))
            break;
        if (++probes > MAX_PROBES)
            return 0;
    }
    v->by_rank[rank] = merge;
    v->by_pair[slot] = rank + 1;
    return 1;
}

static int is_key(const np_json_string *key, const char *name)
{
    return key->length == strlen(name) && !memcmp(key->bytes, name, key->length);
}

static void read_key(np_json *json, np_json_string *key)
{
    np_json_read_string(json, key);
    np_json_expect(json, ':');
}

/* Find the fields of `model`. Each may be there once. */
static int find_fields(np_json json, fields *found, np_json_string *key, uint64_t cut[4])
{
    const uint8_t *start = json.at;
    int models = 0, first = 1;
    memset(found, 0, sizeof *found);
    np_json_expect(&json, '{');
    while (np_json_next(&json, '}', &first)) {
        read_key(&json, key);
        if (!is_key(key, "model")) {
            np_json_skip(&json);
            continue;
        }
        int first_field = 1;
        models++;
        np_json_expect(&json, '{');
        while (np_json_next(&json, '}', &first_field)) {
            read_key(&json, key);
            const int of = is_key(key, "vocab") ? 0 : is_key(key, "merges") ? 1 : -1;
            np_json *field = of ? &found->merges : &found->vocabulary;
            const np_json value = json;
            np_json_skip(&json);
            if (of < 0)
                continue;
            if (field->at)
                return 0;
            *field = (np_json){value.at, json.at, 0};
            cut[2 * of] = (uint64_t)(value.at - start);
            cut[2 * of + 1] = (uint64_t)(json.at - start);
        }
    }
    return !json.failed && models == 1 && found->vocabulary.at && found->merges.at;
}

/* Read all tokens. Counts them if the tables are not there yet, else fills these. */
static int read_tokens(np_vocabulary *v, np_json json, np_json_string *name, uint64_t *name_bytes)
{
    int first = 1;
    *name_bytes = v->tokens = 0;
    np_json_expect(&json, '{');
    while (np_json_next(&json, '}', &first)) {
        np_json_read_string(&json, name);
        np_json_expect(&json, ':');
        const uint32_t id = np_json_read_number(&json, MAX_ID);
        if (json.failed || !name->length)
            return 0;
        if (v->names) {
            v->starts[id] = (uint32_t)*name_bytes;
            memcpy(v->names + *name_bytes, name->bytes, name->length);
            if (!add_name(v, id, name->bytes, name->length))
                return 0;
        }
        *name_bytes += name->length;
        v->tokens++;
        v->ids = id >= v->ids ? id + 1 : v->ids;
        v->longest_bytes = name->length > v->longest_bytes ? name->length : v->longest_bytes;
    }
    return !json.failed && v->tokens;
}

/* Read a merge as one string whose parts have a space between them, or as an array of two. Its parts are left in `name`
 * one behind the other; returns the length of the first, 0 if there are not two. */
static uint32_t read_parts(np_json *json, np_json_string *name)
{
    if (!np_json_take(json, '[')) {
        np_json_read_string(json, name);
        if (name->length >= 8 && !memcmp(name->bytes, "#version", 8))
            return 0; /* the library skips it */
        uint8_t *space = name->length ? memchr(name->bytes, ' ', name->length) : NULL;
        const uint32_t left = space ? (uint32_t)(space - name->bytes) : 0;
        if (!left || left + 1 == name->length || memchr(space + 1, ' ', name->length - left - 1))
            return 0;
        memmove(space, space + 1, name->length - left - 1);
        name->length--;
        return left;
    }
    np_json_read_string(json, name);
    np_json_expect(json, ',');
    const uint32_t left = name->length;
    np_json_string right = {name->bytes + left, 0, name->capacity - left};
    np_json_read_string(json, &right);
    np_json_expect(json, ']');
    name->length += right.length;
    return right.length ? left : 0;
}

/* Read all merges. Counts them if the tables are not there yet, else fills these. */
static int read_merges(np_vocabulary *v, np_json json, np_json_string *name)
{
    int first = 1;
    v->merges = 0;
    np_json_expect(&json, '[');
    while (np_json_next(&json, ']', &first)) {
        if (!v->by_pair) {
            np_json_skip(&json);
        } else {
            const uint32_t left = read_parts(&json, name);
            if (json.failed || !left)
                return 0;
            const np_merge merge = {
                np_vocabulary_token(v, name->bytes, left),
                np_vocabulary_token(v, name->bytes + left, name->length - left),
                np_vocabulary_token(v, name->bytes, name->length),
            };
            if (merge.left == NP_NO_TOKEN || merge.right == NP_NO_TOKEN || merge.merged == NP_NO_TOKEN)
                return 0;
            if (!add_merge(v, v->merges, merge))
                return 0;
        }
        if (++v->merges > MAX_ID)
            return 0;
    }
    return !json.failed;
}

static int allocate(np_vocabulary *v, uint64_t name_bytes, uint64_t max_bytes)
{
    v->name_slots = 2 * (uint64_t)v->tokens + 1;
    v->pair_slots = (uint64_t)v->merges + v->merges / 2 + 1;
    v->bytes = sizeof *v + name_bytes + 8 * (uint64_t)v->ids + 4 * v->name_slots + sizeof(np_merge) * (uint64_t)v->merges + 4 * v->pair_slots;
    if (v->bytes > max_bytes || name_bytes > UINT32_MAX)
        return 0;
    v->names = malloc(name_bytes);
    v->starts = malloc(4 * (size_t)v->ids);
    v->lengths = calloc(v->ids, 4);
    v->by_name = calloc(v->name_slots, 4);
    v->by_rank = malloc(sizeof(np_merge) * ((size_t)v->merges + 1));
    v->by_pair = calloc(v->pair_slots, 4);
    return v->names && v->starts && v->lengths && v->by_name && v->by_rank && v->by_pair;
}

static int read_tables(np_vocabulary *v, np_json json, np_json_string *name, uint64_t max_bytes, uint64_t cut[4])
{
    fields found;
    uint64_t name_bytes;
    if (!find_fields(json, &found, name, cut) || !read_tokens(v, found.vocabulary, name, &name_bytes)
        || !read_merges(v, found.merges, name))
        return NP_E_ARGUMENT;
    if (!allocate(v, name_bytes, max_bytes))
        return NP_E_MEMORY;
    return read_tokens(v, found.vocabulary, name, &name_bytes) && read_merges(v, found.merges, name) ? NP_OK : NP_E_ARGUMENT;
}

int np_vocabulary_read(const uint8_t *json, uint64_t bytes, uint64_t max_bytes, np_vocabulary **vocabulary, uint64_t cut[4])
{
    np_vocabulary *v = calloc(1, sizeof *v);
    np_json_string name = {malloc(MAX_NAME_BYTES), 0, MAX_NAME_BYTES};
    int result = NP_E_MEMORY;
    if (v && name.bytes)
        result = read_tables(v, (np_json){json, json + bytes, 0}, &name, max_bytes, cut);
    free(name.bytes);
    if (result != NP_OK)
        np_vocabulary_free(v);
    *vocabulary = result == NP_OK ? v : NULL;
    return result;
}

void np_vocabulary_free(np_vocabulary *v)
{
    if (!v)
        return;
    free(v->names);
    free(v->starts);
    free(v->lengths);
    free(v->by_name);
    free(v->by_rank);
    free(v->by_pair);
    free(v);
}

uint64_t np_vocabulary_bytes(const np_vocabulary *v) { return v->bytes; }

uint32_t np_vocabulary_tokens(const np_vocabulary *v) { return v->tokens; }

uint32_t np_vocabulary_ids(const np_vocabulary *v) { return v->ids; }

uint32_t np_vocabulary_longest_bytes(const np_vocabulary *v) { return v->longest_bytes; }

uint32_t np_vocabulary_characters(const np_vocabulary *v, uint32_t *ids)
{
    uint32_t count = 0;
    for (uint32_t id = 0; id < v->ids; id++)
        if (v->lengths[id] && v->lengths[id] == np_character_bytes(v->names[v->starts[id]])) {
            if (ids)
                ids[count] = id;
            count++;
        }
    return count;
}

int np_vocabulary_is_spelled(const np_vocabulary *v)
{
    for (uint32_t id = 0; id < v->ids; id++) {
        const uint8_t *name = v->names + (v->lengths[id] ? v->starts[id] : 0);
        for (uint32_t at = 0; at < v->lengths[id]; at += np_character_bytes(name[at]))
            if (np_vocabulary_token(v, name + at, np_character_bytes(name[at])) == NP_NO_TOKEN)
                return 0;
    }
    return 1;
}

const uint8_t *np_vocabulary_name(const np_vocabulary *v, uint32_t id, uint32_t *bytes)
{
    *bytes = id < v->ids ? v->lengths[id] : 0;
    return *bytes ? v->names + v->starts[id] : NULL;
}
