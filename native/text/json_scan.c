/* See json_scan.h. */
#include "json_scan.h"

#include <string.h>

static uint8_t fail(np_json *json)
{
    json->failed = 1;
    json->at = json->end;
    return 0;
}

/* The next byte behind white space, not yet read; 0 at the end. */
static uint8_t peek(np_json *json)
{
    while (json->at < json->end && (*json->at == ' ' || *json->at == '\n' || *json->at == '\r' || *json->at == '\t'))
        json->at++;
    return json->at < json->end ? *json->at : 0;
}

/* The next byte of a string, read. */
static uint8_t next_byte(np_json *json) { return json->at < json->end ? *json->at++ : fail(json); }

int np_json_take(np_json *json, uint8_t character)
{
    if (peek(json) != character)
        return 0;
    json->at++;
    return 1;
}

void np_json_expect(np_json *json, uint8_t character)
{
    if (!np_json_take(json, character))
        fail(json);
}

int np_json_next(np_json *json, uint8_t close, int *first)
{
    if (np_json_take(json, close))
        return 0;
    if (!*first)
        np_json_expect(json, ',');
    *first = 0;
    return !json->failed;
}

static void append(np_json *json, np_json_string *string, uint8_t byte)
{
    if (string->length < string->capacity)
        string->bytes[string->length++] = byte;
    else
        fail(json);
}

static void append_character(np_json *json, np_json_string *string, uint32_t code)
{
    if (code < 0x80) {
        append(json, string, (uint8_t)code);
        return;
    }
    const int further = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const uint8_t lead[] = {0, 0xC0, 0xE0, 0xF0};
    append(json, string, (uint8_t)(lead[further] | code >> 6 * further));
    for (int i = further - 1; i >= 0; i--)
        append(json, string, (uint8_t)(0x80 | (code >> 6 * i & 0x3F)));
}

static uint32_t read_hex(np_json *json)
{
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) {
        const uint8_t c = next_byte(json), lower = c | 0x20;
        if (c >= '0' && c <= '9')
            value = value << 4 | (uint32_t)(c - '0');
        else if (lower >= 'a' && lower <= 'f')
            value = value << 4 | (uint32_t)(lower - 'a' + 10);
        else
            return fail(json);
    }
    return value;
}

static void read_escape(np_json *json, np_json_string *string)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const uint8_t c = next_byte(json);
    const char *named = c ? strchr(names, c) : NULL;
    if (named) {
        append(json, string, (uint8_t)values[named - names]);
        return;
    }
    if (c != 'u') {
        fail(json);
        return;
    }
    uint32_t code = read_hex(json);
    if (code >= 0xD800 && code < 0xDC00) {
        const int escaped = next_byte(json) == '\\' && next_byte(json) == 'u';
        const uint32_t low = escaped ? read_hex(json) : 0;
        if (low < 0xDC00 || low > 0xDFFF) {
            fail(json);
            return;
        }
        code = 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00));
    } else if (code >= 0xDC00 && code <= 0xDFFF) {
        fail(json);
        return;
    }
    append_character(json, string, code);
}

/* Copy a character of several bytes, which begins with `lead`. */
static void copy_character(np_json *json, np_json_string *string, uint8_t lead)
{
    static const uint32_t least[] = {0, 0x80, 0x800, 0x10000};
    const int further = lead >= 0xC2 && lead < 0xE0 ? 1 : lead >= 0xE0 && lead < 0xF0 ? 2 : lead >= 0xF0 && lead < 0xF5 ? 3 : 0;
    uint32_t code = lead & (0x3Fu >> further);
    if (!further) {
        fail(json);
        return;
    }
    for (int i = 0; i < further; i++) {
        const uint8_t byte = next_byte(json);
        if ((byte & 0xC0) != 0x80) {
            fail(json);
            return;
        }
        code = code << 6 | (byte & 0x3F);
    }
    if (code < least[further] || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF))
        fail(json);
    else
        append_character(json, string, code);
}

void np_json_read_string(np_json *json, np_json_string *string)
{
    string->length = 0;
    np_json_expect(json, '"');
    while (!json->failed) {
        const uint8_t c = next_byte(json);
        if (c == '"')
            return;
        if (c == '\\')
            read_escape(json, string);
        else if (c >= 0x80)
            copy_character(json, string, c);
        else if (c < 0x20)
            fail(json);
        else
            append(json, string, c);
    }
}

uint32_t np_json_read_number(np_json *json, uint32_t largest)
{
    uint64_t value = 0;
    if (peek(json) < '0' || *json->at > '9')
        return fail(json);
    while (json->at < json->end && *json->at >= '0' && *json->at <= '9') {
        value = 10 * value + (uint64_t)(*json->at++ - '0');
        if (value > largest)
            return fail(json);
    }
    const uint8_t after = json->at < json->end ? *json->at : 0;
    return after == '.' || after == 'e' || after == 'E' ? fail(json) : (uint32_t)value;
}

static void skip_string(np_json *json)
{
    for (uint8_t c = 0; !json->failed && c != '"';)
        if ((c = next_byte(json)) == '\\')
            next_byte(json);
}

void np_json_skip(np_json *json)
{
    uint64_t depth = 0;
    do {
        const uint8_t c = peek(json);
        if (!c || (!depth && (c == ',' || c == '}' || c == ']'))) { /* the end, or no value */
            fail(json);
            return;
        }
        json->at++;
        if (c == '"')
            skip_string(json);
        else if (c == '{' || c == '[')
            depth++;
        else if (c == '}' || c == ']')
            depth--;
        else if (!depth) /* a number or a word */
            while (json->at < json->end && !strchr(",]} \n\r\t", *json->at))
                json->at++;
    } while (depth && !json->failed);
}
