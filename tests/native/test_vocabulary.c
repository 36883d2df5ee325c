/* Vocabularies: what a tokenizer.json may contain, the order of merges, and files that are cut off or made to collide. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "neuronpipe.h"
#include "require.h"

static const char TOKENS[] = "{\"a\": 0, \"b\": 1, \"c\": 2, \"ab\": 3, \"bc\": 4, \"abc\": 5, \"\\u00e9\\n\": 7, \"\\ud83d\\ude42\": 8, \"aa\": 9}";
static const char MERGES[] = "[\"b c\", [\"a\", \"b\"], \"ab c\", [\"a\", \"bc\"], \"a a\"]";
enum { A, B, C, AB, BC, ABC, MISSING, ESCAPED, SMILE, AA };

/* Read a copy without a byte behind it, so that sanitizers see a read past the end. */
static int read_copy(const char *json, size_t bytes, uint64_t max_bytes, np_vocabulary **vocabulary, uint64_t cut[4])
{
    uint8_t *copy = malloc(bytes ? bytes : 1);
    memcpy(copy, json, bytes);
    const int result = np_vocabulary_read(copy, bytes, max_bytes, vocabulary, cut);
    free(copy);
    return result;
}

static char *document(const char *tokens, const char *merges)
{
    static const char form[] = "{\"x\": [{\"model\": \"}\\\"\"}, -1.5e3, null], \"model\": {\"type\": \"BPE\", \"vocab\": %s ,\"merges\":%s}, \"y\": true}";
    const size_t bytes = sizeof form + strlen(tokens) + strlen(merges);
    char *json = malloc(bytes);
    snprintf(json, bytes, form, tokens, merges);
    return json;
}

static int result_of(const char *tokens, const char *merges, uint64_t max_bytes)
{
    char *json = document(tokens, merges);
    np_vocabulary *vocabulary;
    uint64_t cut[4];
    const int result = read_copy(json, strlen(json), max_bytes, &vocabulary, cut);
    CHECK(!vocabulary == (result != NP_OK), "%d", result);
    np_vocabulary_free(vocabulary);
    free(json);
    return result;
}

static np_vocabulary *read_all(void)
{
    char *json = document(TOKENS, MERGES);
    np_vocabulary *vocabulary;
    uint64_t cut[4];
    REQUIRE_EQUAL(read_copy(json, strlen(json), 1 << 20, &vocabulary, cut), NP_OK);
    CHECK(!strncmp(json + cut[0], " ", 1) && !strncmp(json + cut[0] + 1, TOKENS, strlen(TOKENS)), "the vocabulary's start");
    CHECK(cut[1] - cut[0] == 1 + strlen(TOKENS), "the vocabulary's end");
    CHECK(!strncmp(json + cut[2], MERGES, strlen(MERGES)) && cut[3] - cut[2] == strlen(MERGES), "the merges' place");
    free(json);
    return vocabulary;
}

static void require_name(const np_vocabulary *vocabulary, uint32_t id, const char *name)
{
    uint32_t bytes;
    const uint8_t *found = np_vocabulary_name(vocabulary, id, &bytes);
    CHECK((found != NULL) == (name != NULL), "id %u", id);
    if (found && name) {
        CHECK(bytes == strlen(name) && !memcmp(found, name, bytes), "id %u", id);
        CHECK(np_vocabulary_token(vocabulary, found, bytes) == id, "id %u", id);
    }
}

static void test_names(void)
{
    np_vocabulary *vocabulary = read_all();
    REQUIRE_EQUAL(np_vocabulary_ids(vocabulary), AA + 1);
    REQUIRE_EQUAL(np_vocabulary_tokens(vocabulary), 9);
    REQUIRE_EQUAL(np_vocabulary_longest_bytes(vocabulary), 4);
    require_name(vocabulary, ABC, "abc");
    require_name(vocabulary, MISSING, NULL);
    require_name(vocabulary, ESCAPED, "\xc3\xa9\n");
    require_name(vocabulary, SMILE, "\xf0\x9f\x99\x82");
    require_name(vocabulary, AA + 1, NULL);
    uint32_t ids[9];
    REQUIRE_EQUAL(np_vocabulary_characters(vocabulary, ids), 4);
    CHECK(ids[0] == A && ids[2] == C && ids[3] == SMILE, "characters");
    REQUIRE_EQUAL(np_vocabulary_is_spelled(vocabulary), 0); /* no token is a line break */
    np_vocabulary_free(vocabulary);
}

static void require_merged(const np_vocabulary *vocabulary, const char *symbols, int whole_words, const char *expected)
{
    /* A word begins behind each space; digits are ids. */
    uint32_t tokens[64];
    uint8_t starts[64];
    size_t count = 0, kept = 0;
    for (const char *at = symbols; *at; at++)
        if (*at != ' ') {
            starts[count] = at == symbols || at[-1] == ' ';
            tokens[count++] = *at == '?' ? 1000 : (uint32_t)(*at - '0');
        }
    const int64_t merged = np_vocabulary_merge(vocabulary, tokens, starts, count, whole_words);
    for (const char *at = expected; *at; at++, kept++)
        CHECK(merged > (int64_t)kept && tokens[kept] == (*at == '?' ? 1000 : (uint32_t)(*at - '0')), "%s: token %zu", symbols, kept);
    CHECK(merged == (int64_t)kept, "%s: %lld tokens", symbols, (long long)merged);
}

static void test_merges(void)
{
    np_vocabulary *vocabulary = read_all();
    require_merged(vocabulary, "", 0, "");
    require_merged(vocabulary, "012", 0, "5");       /* b c comes first, then a bc */
    require_merged(vocabulary, "01", 0, "3");
    require_merged(vocabulary, "01 2", 0, "32");     /* words are merged by themselves */
    require_merged(vocabulary, "00000", 0, "990");   /* from the left */
    require_merged(vocabulary, "0012", 0, "05");     /* a bc has the lower rank */
    require_merged(vocabulary, "000 0", 0, "900");
    require_merged(vocabulary, "0?12", 0, "0?4");    /* an id without a token stays */
    require_merged(vocabulary, "6", 1, "6");
    np_vocabulary_free(vocabulary);
}

static void test_whole_words(void)
{
    char *json = document("{\"a\": 0, \"b\": 1, \"ab\": 2, \"abab\": 3, \"aa\": 4}", "[\"a b\"]");
    np_vocabulary *vocabulary;
    uint64_t cut[4];
    REQUIRE_EQUAL(read_copy(json, strlen(json), 1 << 20, &vocabulary, cut), NP_OK);
    free(json);
    require_merged(vocabulary, "0101 01", 0, "222");
    require_merged(vocabulary, "0101 01 00 010", 1, "32420");
    require_merged(vocabulary, "01010101", 1, "2222"); /* longer than every name */
    np_vocabulary_free(vocabulary);
}

static void test_the_later_of_two_equal_merges_counts(void)
{
    char *json = document("{\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"bc\":4}", "[\"a b\", \"b c\", \"a b\"]");
    np_vocabulary *vocabulary;
    uint64_t cut[4];
    REQUIRE_EQUAL(read_copy(json, strlen(json), 1 << 20, &vocabulary, cut), NP_OK);
    free(json);
    require_merged(vocabulary, "012", 0, "04");
    np_vocabulary_free(vocabulary);
}

static void test_what_is_refused(void)
{
    static const char *const tokens[] = {
        "{\"a\": 0, \"a\": 1}",    "{\"a\": 0, \"b\": 0}", "{\"\": 0}",          "{\"a\": -1}",       "{\"a\": 1.5}",        "{\"a\": 1e3}",
        "{\"a\": 99999999999999}", "{\"\\ud800\": 0}",     "{\"\\udc00\": 0}",   "{\"\\u00g0\": 0}",  "{\"\\x\": 0}",        "{\"\xff\": 0}",
        "{\"\xc0\x80\": 0}",       "{\"\xe2\x82\": 0}",    "{\"\xed\xa0\x80\": 0}", "{\"a\nb\": 0}",  "{\"a\": 0,}",         "{\"a\" 0}",
        "{}",                      "[]",                   "{\"\\ud83dx\": 0}",  "{\"\xf5\x80\x80\x80\": 0}", "{\"a\": \"0\"}", "null"};
    static const char *const merges[] = {"[\"ab\"]", "[\"a  b\"]", "[\" b\"]", "[\"a \"]", "[[\"a\"]]", "[[\"a\", \"b\", \"c\"]]", "[\"a x\"]",
                                         "[\"b a\"]", "[\"a b c\"]", "[[\"\", \"a\"]]", "{}", "[1]", "[\"a b\",]"};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        CHECK(result_of(tokens[i], "[]", 1 << 20) == NP_E_ARGUMENT, "%s", tokens[i]);
    for (size_t i = 0; i < sizeof merges / sizeof *merges; i++)
        CHECK(result_of("{\"a\": 0, \"b\": 1, \"c\": 3, \"ab\": 2}", merges[i], 1 << 20) == NP_E_ARGUMENT, "%s", merges[i]);
    CHECK(result_of(TOKENS, MERGES, 1 << 20) == NP_OK, "all of it");
    CHECK(result_of(TOKENS, MERGES, 100) == NP_E_MEMORY, "larger than allowed");
    CHECK(result_of("{\"a\": 16000000}", "[]", 1 << 20) == NP_E_MEMORY, "a table for ids that are not there");
}

static void test_a_file_that_is_cut_off(void)
{
    char *json = document(TOKENS, MERGES);
    for (size_t bytes = 0; bytes < strlen(json) - strlen("}, \"y\": true}"); bytes++) {
        np_vocabulary *vocabulary;
        uint64_t cut[4];
        CHECK(read_copy(json, bytes, 1 << 20, &vocabulary, cut) == NP_E_ARGUMENT && !vocabulary, "%zu bytes", bytes);
    }
    free(json);
}

static void test_damaged_files(void)
{
    char *json = document(TOKENS, MERGES);
    const size_t bytes = strlen(json);
    for (int round = 0; round < 20000; round++) {
        char *damaged = malloc(bytes);
        memcpy(damaged, json, bytes);
        for (uint32_t changes = random_bits() % 3 + 1; changes; changes--)
            damaged[random_bits() % bytes] = random_bits() % 2 ? json[random_bits() % bytes] : (char)random_bits();
        np_vocabulary *vocabulary;
        uint64_t cut[4];
        const int result = read_copy(damaged, bytes, 1 << 16, &vocabulary, cut);
        CHECK(!vocabulary == (result != NP_OK), "%d", result);
        if (vocabulary) {
            uint32_t tokens[] = {A, B, C, A, A, B, AB, SMILE};
            const uint8_t starts[] = {1, 0, 0, 0, 1, 0, 0, 0};
            const int64_t kept = np_vocabulary_merge(vocabulary, tokens, starts, 8, round & 1);
            CHECK(kept > 0 && kept <= 8, "%lld", (long long)kept);
            np_vocabulary_is_spelled(vocabulary);
            np_vocabulary_free(vocabulary);
        }
        free(damaged);
    }
    free(json);
}

/* Deep nesting and long runs take no stack and linear time. */
static void test_nesting(void)
{
    enum { DEPTH = 1 << 20 };
    char *json = malloc(2 * DEPTH + 200);
    memset(json, '[', DEPTH);
    np_vocabulary *vocabulary;
    uint64_t cut[4];
    CHECK(read_copy(json, DEPTH, 1 << 20, &vocabulary, cut) == NP_E_ARGUMENT, "no object");
    const int start = sprintf(json, "{\"x\":");
    memset(json + start, '[', DEPTH);
    memset(json + start + DEPTH, ']', DEPTH);
    sprintf(json + start + 2 * DEPTH, ",\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}");
    CHECK(read_copy(json, strlen(json), 1 << 20, &vocabulary, cut) == NP_OK, "a deep value beside the model");
    np_vocabulary_free(vocabulary);
    free(json);
}

int main(void)
{
    test_names();
    test_merges();
    test_whole_words();
    test_the_later_of_two_equal_merges_counts();
    test_what_is_refused();
    test_a_file_that_is_cut_off();
    test_damaged_files();
    test_nesting();
    return checks_report();
}
