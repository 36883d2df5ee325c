/* SHA-256 (FIPS 180-4) of one block of memory, as 64 hexadecimal digits and a zero byte. */
#ifndef SHA256_H
#define SHA256_H
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

void sha256_text(const void *bytes, size_t count, char text[65]);
#ifdef __cplusplus
}
#endif
#endif
