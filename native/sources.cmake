# The native library's sources, for the extension, the C tests and npu-prefill.
file(GLOB NP_SOURCES CONFIGURE_DEPENDS
  ${CMAKE_CURRENT_LIST_DIR}/kernels/*.c
  ${CMAKE_CURRENT_LIST_DIR}/sync/*.c
  ${CMAKE_CURRENT_LIST_DIR}/flash/*.c
  ${CMAKE_CURRENT_LIST_DIR}/residency/*.c
  ${CMAKE_CURRENT_LIST_DIR}/engine/*.c
  ${CMAKE_CURRENT_LIST_DIR}/engine/offload/*.c
  ${CMAKE_CURRENT_LIST_DIR}/process/*.c
  ${CMAKE_CURRENT_LIST_DIR}/steps/*.c
  ${CMAKE_CURRENT_LIST_DIR}/text/*.c
  ${CMAKE_CURRENT_LIST_DIR}/trace/*.c)
# The C client library, for services written in C; no part of the extension.
file(GLOB NP_CLIENT_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/client/*.c)
set(NP_COMPILE_OPTIONS -O3 -Wall -Wextra -Wvla -Wno-unused-parameter -ffp-contract=off -fno-math-errno)
