/* NEON with the dot product instructions (Armv8.2 dotprod): quantized rows. All other kernels are those of NEON. */
#if defined(__aarch64__)
#if defined(__clang__)
#define TARGET __attribute__((target("dotprod")))
#else
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define DOT_Q8 np_dotprod_dot_q8
#define DOT_Q4 np_dotprod_dot_q4
#define DOT_Q3 np_dotprod_dot_q3
#define DOT_IQ4 np_dotprod_dot_iq4
#define DOT_MXFP4 np_dotprod_dot_mxfp4
#define DOT_Q4H np_dotprod_dot_q4h
#define DOT_Q5H np_dotprod_dot_q5h
#define DOT_Q4K np_dotprod_dot_q4k
#define DOT_Q5K np_dotprod_dot_q5k
#define DOT_Q6K np_dotprod_dot_q6k
#include "kernels/isa.h"

#include <arm_neon.h>

NP_INLINE TARGET int32x4_t multiply_add(int32x4_t sum, int8x16_t w, int8x16_t x) { return vdotq_s32(sum, w, x); }

#include "kernels/neon_rows.h"
#endif
