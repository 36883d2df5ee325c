/* SHA-256 (FIPS 180-4), to verify files of a package against its manifest. */
#ifndef NEURONPIPE_SHA256_H
#define NEURONPIPE_SHA256_H
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Hash `count` bytes. text: 64 hexadecimal digits and a zero byte. */
void sha256_text(const void *bytes, size_t count, char text[65]);
#ifdef __cplusplus
}
#endif
#endif
