/* Merges the symbols of words to tokens. The merge with the lowest rank comes first, and of equal ones the leftmost, so a
 * heap of all pairs of neighbours gives their order; an entry whose pair has changed since is skipped. */
#include <stdlib.h>
#include <string.h>

#include "vocabulary.h"

#define NO_NEIGHBOUR UINT32_MAX

typedef struct {
    uint32_t token, before, after; /* `after` of a symbol that is part of another: itself */
} symbol;

typedef struct {
    uint32_t rank, at; /* of the left neighbour */
} candidate;

typedef struct {
    symbol *symbols;       /* [capacity] */
    candidate *candidates; /* [2 * capacity]: each merge replaces one by at most two */
    uint8_t *name;         /* [longest name] */
    uint64_t capacity, count;
} work;

static int precedes(const candidate *a, const candidate *b) { return a->rank < b->rank || (a->rank == b->rank && a->at < b->at); }

static void push(work *w, candidate new_one)
{
    uint64_t place = w->count++;
    for (; place && precedes(&new_one, &w->candidates[(place - 1) / 2]); place = (place - 1) / 2)
        w->candidates[place] = w->candidates[(place - 1) / 2];
    w->candidates[place] = new_one;
}

static candidate pop(work *w)
{
    const candidate first = w->candidates[0], last = w->candidates[--w->count];
    uint64_t place = 0;
    for (uint64_t child; (child = 2 * place + 1) < w->count; place = child) {
        if (child + 1 < w->count && precedes(&w->candidates[child + 1], &w->candidates[child]))
            child++;
        if (!precedes(&w->candidates[child], &last))
            break;
        w->candidates[place] = w->candidates[child];
    }
    w->candidates[place] = last;
    return first;
}

/* Add the pair of a symbol and the one after it, if they can be merged. */
static void push_pair(const np_vocabulary *v, work *w, uint32_t at)
{
    if (at == NO_NEIGHBOUR || w->symbols[at].after == NO_NEIGHBOUR)
        return;
    const uint32_t left = w->symbols[at].token, right = w->symbols[w->symbols[at].after].token;
    const uint32_t rank = np_vocabulary_rank(v, left, right);
    if (rank != NP_NO_MERGE)
        push(w, (candidate){rank, at});
}

/* Merge a word of `count` symbols in place. Returns the number of its tokens. */
static uint64_t merge_word(const np_vocabulary *v, work *w, uint32_t *tokens, uint64_t count)
{
    symbol *symbols = w->symbols;
    for (uint32_t i = 0; i < count; i++)
        symbols[i] = (symbol){tokens[i], i ? i - 1 : NO_NEIGHBOUR, i + 1 < count ? i + 1 : NO_NEIGHBOUR};
    w->count = 0;
    for (uint32_t i = 0; i + 1 < count; i++)
        push_pair(v, w, i);
    while (w->count) {
        const candidate next = pop(w);
        const np_merge *merge = &v->by_rank[next.rank];
        symbol *left = &symbols[next.at];
        if (left->after == next.at || left->after == NO_NEIGHBOUR || left->token != merge->left)
            continue;
        symbol *right = &symbols[left->after];
        if (right->token != merge->right)
            continue;
        const uint32_t merged_at = left->after;
        left->token = merge->merged;
        left->after = right->after;
        if (right->after != NO_NEIGHBOUR)
            symbols[right->after].before = next.at;
        right->after = merged_at;
        push_pair(v, w, left->before);
        push_pair(v, w, next.at);
    }
    uint64_t kept = 0;
    for (uint32_t at = 0; at != NO_NEIGHBOUR; at = symbols[at].after)
        tokens[kept++] = symbols[at].token;
    return kept;
}

/* Return the token whose name is that of all symbols together; NP_NO_TOKEN if there is none, or a symbol is no character
 * of the word: a byte, or the unknown token. */
static uint32_t whole_word(const np_vocabulary *v, work *w, const uint32_t *tokens, uint64_t count)
{
    uint32_t length = 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint32_t bytes = tokens[i] < v->ids ? v->lengths[tokens[i]] : 0;
        if (!bytes || bytes > v->longest_bytes - length || bytes != np_character_bytes(v->names[v->starts[tokens[i]]]))
            return NP_NO_TOKEN;
        memcpy(w->name + length, v->names + v->starts[tokens[i]], bytes);
        length += bytes;
    }
    return np_vocabulary_token(v, w->name, length);
}

static int make_room(const np_vocabulary *v, work *w, const uint8_t *starts, uint64_t count)
{
    for (uint64_t start = 0, at = 1; at <= count; at++)
        if (at == count || starts[at]) {
            w->capacity = at - start > w->capacity ? at - start : w->capacity;
            start = at;
        }
    w->symbols = malloc(w->capacity * sizeof *w->symbols);
    w->candidates = malloc(2 * w->capacity * sizeof *w->candidates);
    w->name = malloc(v->longest_bytes);
    return w->symbols && w->candidates && w->name;
}

static void free_room(work *w)
{
    free(w->symbols);
    free(w->candidates);
    free(w->name);
}

int64_t np_vocabulary_merge(const np_vocabulary *v, uint32_t *tokens, const uint8_t *starts, uint64_t count, int whole_words)
{
    if (count >= NO_NEIGHBOUR)
        return NP_E_ARGUMENT;
    if (!count)
        return 0;
    work w = {0};
    uint64_t kept = 0;
    if (!make_room(v, &w, starts, count)) {
        free_room(&w);
        return NP_E_MEMORY;
    }
    for (uint64_t start = 0, end; start < count; start = end) {
        for (end = start + 1; end < count && !starts[end]; end++)
            ;
        const uint32_t whole = whole_words ? whole_word(v, &w, tokens + start, end - start) : NP_NO_TOKEN;
        const uint64_t merged = whole == NP_NO_TOKEN ? merge_word(v, &w, tokens + start, end - start) : 1;
        if (whole != NP_NO_TOKEN)
            tokens[start] = whole;
        memmove(tokens + kept, tokens + start, merged * sizeof *tokens);
        kept += merged;
    }
    free_room(&w);
    return (int64_t)kept;
}
