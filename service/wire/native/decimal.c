/* Decimal -> binary: the float64 that is nearest to digits x 10^exponent.
 *
 * Where digits and power are both exact as float64, one multiplication or division rounds correctly (Clinger 1990). Otherwise 128 bits of
 * the power, multiplied by the digits, give the 54 bits that decide (Eisel and Lemire: "Number parsing at a gigabyte per second", 2021).
 * For digits of 64 bits that is never ambiguous (Mushtak and Lemire: "Fast number parsing without fallback", 2023). */
#include "numbers.h"
#include <math.h>
#include <string.h>

#define BIAS 1023 /* of the exponent of a float64, whose mantissa has 52 bits after the first */
#define LARGEST_EXPONENT 2047
#define LARGEST_POWER 308 /* of ten, that a float64 represents */

const double POWERS_EXACT[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                               1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

static double assemble(uint64_t mantissa, int64_t exponent)
{
    uint64_t bits = (mantissa & (((uint64_t)1 << 52) - 1)) | (uint64_t)exponent << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

double eisel_lemire(uint64_t digits, int64_t power)
{
    if (!digits || power < LOWEST_POWER) return 0.0;
    if (power > LARGEST_POWER) return HUGE_VAL;
    int zeros = __builtin_clzll(digits);
    digits <<= zeros;
    const power_of_ten *ten = &POWERS[power - LOWEST_POWER];
    unsigned __int128 product = (unsigned __int128)digits * ten->high;
    uint64_t high = (uint64_t)(product >> 64), low = (uint64_t)product;
    if ((high & 0x1ff) == 0x1ff) { /* the low half of the power may decide */
        uint64_t more = (uint64_t)((unsigned __int128)digits * ten->low >> 64);
        low += more;
        high += low < more;
    }
    int top = (int)(high >> 63);
    uint64_t mantissa = high >> (top + 9); /* 54 bits, of which the last one rounds */
    int64_t exponent = ((217706 * power) >> 16) + 63 + top - zeros + BIAS; /* 217706 / 2^16 is log2(10) */
    if (exponent <= 0) { /* subnormal */
        if (exponent <= -63) return 0.0;
        mantissa >>= 1 - exponent;
        mantissa = (mantissa + (mantissa & 1)) >> 1;
        return assemble(mantissa, (int64_t)(mantissa >> 52));
    }
    int tie = low <= 1 && power >= -4 && power <= 23 && (mantissa & 3) == 1 && mantissa << (top + 9) == high;
    mantissa = (mantissa + (mantissa & 1 & !tie)) >> 1;
    if (mantissa >> 53) exponent++, mantissa >>= 1;
    return exponent >= LARGEST_EXPONENT ? HUGE_VAL : assemble(mantissa, exponent);
}
