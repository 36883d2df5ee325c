/* Reading JSON from memory without a tree of it. Positions never pass `end`. After an error `failed` is set, and
 * nothing more is read. Only what is read is checked: skipped values need to have closed strings and brackets. */
#ifndef NP_TEXT_JSON_SCAN_H
#define NP_TEXT_JSON_SCAN_H
#include <stdint.h>

typedef struct {
    const uint8_t *at, *end;
    int failed;
} np_json;

/* A decoded string. It fails if the string has more than `capacity` bytes. */
typedef struct {
    uint8_t *bytes;
    uint32_t length, capacity;
} np_json_string;

/* Read this character behind white space, or fail. */
void np_json_expect(np_json *json, uint8_t character);
/* Read this character behind white space if it comes next; returns 1 if it did. */
int np_json_take(np_json *json, uint8_t character);
/* Begin the next member of an object, or element of an array, that `close` ends: read the comma before it. Returns 0
 * behind the last one. first: 1 before the first one, set to 0 */
int np_json_next(np_json *json, uint8_t close, int *first);
/* Read a string as UTF-8. Invalid UTF-8 and halves of surrogate pairs fail. */
void np_json_read_string(np_json *json, np_json_string *string);
/* Read an integer from 0 to `largest`. */
uint32_t np_json_read_number(np_json *json, uint32_t largest);
/* Skip a value of any kind. */
void np_json_skip(np_json *json);

#endif
