/* The implementations of CRC-32C, for tests; np_crc32c chooses one. Each continues from `crc`, a finished checksum or
 * 0. */
#ifndef NP_FLASH_CRC32C_H
#define NP_FLASH_CRC32C_H
#include <stddef.h>
#include <stdint.h>

uint32_t np_crc32c_by_table(uint32_t crc, const void *data, size_t bytes);
int np_crc32c_has_instruction(void);
uint32_t np_crc32c_by_instruction(uint32_t crc, const void *data, size_t bytes); /* only when the machine has it */

#endif
