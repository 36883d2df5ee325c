/* Encoding values as 16-bit integers. */
#ifndef INTEGERS_H
#define INTEGERS_H
#include <algorithm>
#include <cstdint>

enum { MIDDLE = 32768, MOST = 65535 };

/* An integer represents step * (integer - zero). */
struct Scale {
    double step;
    uint32_t zero;
};

/* Round to nearest even by adding a number whose last binary place is 1: this vectorizes on every x86-64, which a
 * rounding instruction does not. */
template <typename T> static inline uint16_t to_integer(T value, T step, T zero)
{
    const T place = sizeof(T) == sizeof(float) ? T(3 << 22) : T(3) * (INT64_C(1) << 51), far = T(1 << 20);
    const T near = std::min(std::max(value / step, -far), far), integer = (near + place) - place + zero;
    return static_cast<uint16_t>(static_cast<int32_t>(std::min(std::max(integer, T(0)), T(MOST))));
}
#endif
