/* What reading and writing share: powers of ten, the conversion of decimals to float64, and the choice of an instruction set. */
#include "numbers.h"
#include <math.h>
#include <string.h>

/* The first 128 bits of powers of ten, computed when the module is loaded.
 *
 * 10^q = 5^q * 2^q, so its binary digits are those of 5^q. For q >= 0 that is an integer of at most 753 bits. For q < 0 they are those of
 * 2^WIDTH / 5^-q, found by dividing by 5 again and again: floor(floor(x / 5) / 5) = floor(x / 25), so no error builds up. Bits beyond the
 * first 128 are cut off; for -27 <= q < 0 the result is rounded up, as eisel_lemire() requires. */
#define WORDS 34 /* of 32 bits: 5^-342 as a fraction of 2^WIDTH keeps more than 128 bits */
#define WIDTH (32 * (WORDS - 1))
#define ROUNDED_UP (-27)

typedef struct {
    uint32_t words[WORDS]; /* the least significant first */
} large_integer;

power_of_ten POWERS[HIGHEST_POWER - LOWEST_POWER + 1];

static void multiply(large_integer *value, uint32_t factor)
{
    uint64_t carry = 0;
    for (int i = 0; i < WORDS; i++) {
        carry += (uint64_t)value->words[i] * factor;
        value->words[i] = (uint32_t)carry;
        carry >>= 32;
    }
}

static void divide(large_integer *value, uint32_t divisor)
{
    uint64_t rest = 0;
    for (int i = WORDS - 1; i >= 0; i--) {
        rest = rest << 32 | value->words[i];
        value->words[i] = (uint32_t)(rest / divisor);
        rest %= divisor;
    }
}

/* 32 bits of the value, from bit number `bit` up; those below bit 0 are 0. */
static uint64_t bits_from(const large_integer *value, int bit)
{
    uint64_t pair = 0;
    for (int i = 1; i >= 0; i--) {
        int word = (bit + 32 * WORDS) / 32 - WORDS + i;
        pair = pair << 32 | (word >= 0 && word < WORDS ? value->words[word] : 0);
    }
    return (uint32_t)(pair >> ((bit + 32 * WORDS) % 32));
}

static power_of_ten first_bits(const large_integer *value)
{
    int top = WORDS - 1;
    while (!value->words[top]) top--;
    int length = 32 * top + 32 - __builtin_clz(value->words[top]);
    return (power_of_ten){bits_from(value, length - 32) << 32 | bits_from(value, length - 64),
                          bits_from(value, length - 96) << 32 | bits_from(value, length - 128)};
}

static void prepare_powers(void)
{
    large_integer positive = {{1}}, negative = {{0}};
    negative.words[WORDS - 1] = 1;
    for (int q = 0; q <= HIGHEST_POWER; q++, multiply(&positive, 5)) POWERS[q - LOWEST_POWER] = first_bits(&positive);
    for (int q = -1; q >= LOWEST_POWER; q--) {
        divide(&negative, 5);
        power_of_ten power = first_bits(&negative);
        if (q >= ROUNDED_UP && !++power.low) power.high++;
        POWERS[q - LOWEST_POWER] = power;
    }
}

/* Decimal -> binary: the float64 that is nearest to digits x 10^exponent.
 *
 * Where digits and power are both exact as float64, one multiplication or division rounds correctly (Clinger 1990). Otherwise 128 bits of
 * the power, multiplied by the digits, give the 54 bits that decide (Eisel and Lemire: "Number parsing at a gigabyte per second", 2021).
 * For digits of 64 bits that is never ambiguous (Mushtak and Lemire: "Fast number parsing without fallback", 2023). */
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

/* Instruction sets: which ones this processor has, and which one is in use. */
const char *const VARIANT_NAMES[VARIANTS] = {"avx512", "avx2", "portable"};
int variant = PORTABLE;

int can_run(int which)
{
#ifdef X86
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi");
    if (which == AVX2) return avx2;
    if (which == AVX512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw");
#endif
    return which == PORTABLE;
}

void prepare_numbers(void)
{
    prepare_powers();
    prepare_writing();
#ifdef X86
    prepare_reading();
#endif
}
