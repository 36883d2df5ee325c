/* The tables of a byte-pair encoding (neuronpipe.h), read by vocabulary.c and used by merge.c. */
#ifndef NP_TEXT_VOCABULARY_H
#define NP_TEXT_VOCABULARY_H
#include "neuronpipe.h"

/* Two neighbours that become one token. Its rank is its place in the list of merges: the lowest is merged first. */
typedef struct {
    uint32_t left, right, merged;
} np_merge;

struct np_vocabulary {
    uint32_t ids;            /* one more than the largest id */
    uint32_t tokens, merges; /* numbers of tokens and of merges */
    uint32_t longest_bytes;  /* of a name */
    uint8_t *names;          /* one behind another, in the order of the file */
    uint32_t *starts;        /* [ids] of a name in `names` */
    uint32_t *lengths;       /* [ids] of a name in bytes; 0: no token has this id */
    uint32_t *by_name;       /* [name_slots] hash table of ids, plus 1; 0: empty */
    np_merge *by_rank;       /* [merges] */
    uint32_t *by_pair;       /* [pair_slots] hash table of ranks, plus 1; 0: empty */
    uint64_t name_slots, pair_slots, bytes;
};

/* Bytes of the character that begins with `lead`. Names are valid UTF-8. */
static inline uint32_t np_character_bytes(uint8_t lead) { return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4; }

#define NP_NO_MERGE UINT32_MAX

/* Return the rank of the merge of two neighbours; NP_NO_MERGE if they are not merged. */
uint32_t np_vocabulary_rank(const np_vocabulary *vocabulary, uint32_t left, uint32_t right);

#endif
