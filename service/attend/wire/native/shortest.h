/* float32 -> the fewest decimal digits that are read back as the same float32, and of those the nearest to it.
 *
 * Every decimal that is nearer to a float than to its neighbours is read back as that float. Let 10^unit be the largest power of ten that
 * is no larger than the gap between the neighbours. At most one multiple of 10^(unit + 1) is near enough: if there is one, it has the
 * fewest digits; if not, the nearest multiple of 10^unit has. A float64 has 29 bits more than a float32, so it decides this for all but a
 * few numbers in a million. These are recognised by how near they come to a decision, and decided exactly (Raffaello Giulietti: "The
 * Schubfach way to render doubles", 2020). With a limit of decimals d, 10^-d replaces a smaller 10^unit, and its nearest multiple is
 * written.
 *
 * Each step is a loop over a block of numbers without branches, which compilers turn into vector instructions. So these are functions of a
 * header, which write.c compiles once for each variant. */
#ifndef SHORTEST_H
#define SHORTEST_H
#include "numbers.h"
#include <math.h>
#include <string.h>

#define NEAR 1e-6                   /* to a decision, in units of 10^unit: ten times the error of a float64 */
#define ROUNDING 6755399441055744.0 /* 1.5 * 2^52: what is added to this is rounded to an integer, ties to even */
#define FRACTION 0x7fffffu          /* parts of the bits of a float32 */
#define MAGNITUDE 0x7fffffffu
#define SMALLEST_NORMAL 0x00800000u
#define INFINITE 0x7f800000u

#define SPECIAL 1000 /* in place of the position of a point: subnormals, infinities, NaN */
#define DIGITS 3     /* where a number's characters are in its 16: nine digits, */
#define ZERO 12      /* a zero, and the point */
#define POINT 15

static double SCALES[256]; /* 10^-unit, by the exponent of a float32 */
static int32_t UNITS[256];

typedef struct {
    int32_t point[BLOCK];        /* how many digits are before the point, or SPECIAL */
    uint32_t minus[BLOCK];       /* 1 for a minus sign */
    uint32_t text[BLOCK + 1][4]; /* 16 characters: three zeros, nine digits, "000."; one more, since copies of 8 reach beyond */
} block_of_text;

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE int32_t exponent_of(float value) { return bits_of(value) >> 23 & 0xff; }

INLINE int is_special(float value) { return (bits_of(value) & INFINITE) - SMALLEST_NORMAL >= INFINITE - SMALLEST_NORMAL; }

static void prepare_scales(void)
{
    for (int exponent = 1; exponent < 255; exponent++) {
        UNITS[exponent] = ((exponent - 150) * 1262611) >> 22; /* floor(log10(2^(exponent - 150))) */
        SCALES[exponent] = nearest_double(1, -UNITS[exponent]);
    }
}

/* Bits 32 and up of a product of 96 bits, with the last bit set if any of those below is. */
static uint32_t product_to_odd(uint64_t power, uint32_t factor)
{
    uint64_t product = (power >> 32) * factor + ((power & 0xffffffffu) * factor >> 32);
    return (uint32_t)(product >> 32) | ((uint32_t)product > 1);
}

/* The shortest digits of a float that is positive and finite, exactly: returned, times 10^*unit. This is Schubfach; all is in quarters. */
static uint32_t shortest_digits(uint32_t bits, int32_t *unit)
{
    uint32_t fraction = bits & FRACTION, exponent = bits >> 23, integer = exponent ? fraction | SMALLEST_NORMAL : fraction, odd = bits & 1;
    int irregular = !fraction && exponent > 1; /* the float below is only half as far away */
    int binary = (exponent ? (int)exponent : 1) - 150, decimal = (binary * 1262611 - (irregular ? 524031 : 0)) >> 22;
    int shift = binary + ((-decimal * 1741647) >> 19) + 1;
    const power_of_ten *ten = &POWERS[-decimal - LOWEST_POWER];
    uint64_t power = ten->high + (ten->low != 0); /* rounded up */
    uint32_t low = product_to_odd(power, (4 * integer - 2 + (uint32_t)irregular) << shift) + odd;
    uint32_t middle = product_to_odd(power, 4 * integer << shift);
    uint32_t high = product_to_odd(power, (4 * integer + 2) << shift) - odd;
    uint32_t digits = middle / 4, tens = digits / 10;
    int tens_below = low <= 40 * tens, tens_above = 40 * tens + 40 <= high, below = low <= 4 * digits, above = 4 * digits + 4 <= high;
    *unit = decimal;
    if (digits >= 10 && tens_below != tens_above) return (tens + (uint32_t)tens_above) * 10;
    return digits + (uint32_t)(below != above ? above : middle + (digits & 1) > 4 * digits + 2);
}

/* Four digits, the first one in the lowest byte. */
INLINE uint32_t characters_of_4(uint32_t value)
{
    uint32_t hundreds = value * 10486 >> 20, pairs = hundreds | (value - hundreds * 100) << 16, tens = (pairs * 103 >> 10) & 0x000f000fu;
    return 0x30303030u | tens | (pairs - tens * 10) << 8;
}

/* Finds digits and units of a block in float64. In `doubtful`, 1 where it does not decide. `limit` is 10^decimals, or infinite. */
INLINE void find_digits(const float *numbers, double limit, int32_t lowest_unit, int32_t *digits, int32_t *units, int32_t *doubtful)
{
    double scale[BLOCK], value[BLOCK], half[BLOCK];
    for (int i = 0; i < BLOCK; i++) scale[i] = SCALES[exponent_of(numbers[i])];
    for (int i = 0; i < BLOCK; i++) units[i] = UNITS[exponent_of(numbers[i])];
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits = exponent_of(numbers[i]) == 255 ? 0 : bits_of(numbers[i]) & MAGNITUDE;
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        value[i] = (double)magnitude * (scale[i] > limit ? limit : scale[i]);
    }
    for (int i = 0; i < BLOCK; i++) { /* half of the distance to the next float, 2^(exponent - 151) */
        uint64_t bits = (uint64_t)(exponent_of(numbers[i]) + 1023 - 151) << 52;
        memcpy(&half[i], &bits, 8);
        half[i] *= scale[i];
    }
    for (int i = 0; i < BLOCK; i++) {
        double high = value[i] + half[i], ten = (double)(int32_t)(high * 0.1) * 10.0, over = high - ten, below = over - 2 * half[i];
        double up = value[i] + 0.5, nearest = (double)(int32_t)up, part = up - nearest;
        digits[i] = (int32_t)(below <= 0 ? ten : nearest);
        int edge = (over < NEAR) | (over > 10 - NEAR) | ((below < NEAR) & (below > -NEAR));
        doubtful[i] = edge | (part < NEAR) | (part > 1 - NEAR) | !(bits_of(numbers[i]) & FRACTION);
    }
    if (limit == INFINITY) return;
    for (int i = 0; i < BLOCK; i++) {
        int limited = scale[i] > limit;
        int32_t rounded = (int32_t)(value[i] + ROUNDING - ROUNDING);
        digits[i] = limited ? rounded : digits[i];
        units[i] = limited ? lowest_unit : units[i];
        doubtful[i] &= !limited;
    }
    for (int i = 0; i < BLOCK; i++) { /* at least five digits, */
        int few = (digits[i] < 100000) & (digits[i] > 0);
        digits[i] *= few ? 10000 : 1;
        units[i] -= few ? 4 : 0;
    }
    for (int i = 0; i < BLOCK; i++) { /* at least seven */
        int few = (digits[i] < 10000000) & (digits[i] > 0);
        digits[i] *= few ? 100 : 1;
        units[i] -= few ? 2 : 0;
    }
}

/* Gives all numbers nine digits, and writes them. Those of a normal float are seven to nine. */
INLINE void write_digits(int32_t *digits, const int32_t *units, block_of_text *out)
{
    for (int i = 0; i < BLOCK; i++) {
        int32_t below_9 = digits[i] < 100000000, below_8 = digits[i] < 10000000;
        digits[i] *= below_8 ? 100 : below_9 ? 10 : 1;
        out->point[i] = units[i] + 9 - below_9 - below_8;
    }
    for (int i = 0; i < BLOCK; i++) {
        uint32_t all = (uint32_t)digits[i], upper = (uint32_t)((uint64_t)all * 3518437209u >> 45); /* all / 10000 */
        uint32_t first = (uint32_t)((uint64_t)upper * 3518437209u >> 45);
        out->text[i][0] = 0x30000000u | first << 24;
        out->text[i][1] = characters_of_4(upper - first * 10000);
        out->text[i][2] = characters_of_4(all - upper * 10000);
        out->text[i][3] = 0x2e303030u;
    }
}

INLINE void convert_block(const float *restrict numbers, int decimals, block_of_text *restrict out)
{
    int32_t digits[BLOCK], units[BLOCK], doubtful[BLOCK], any = 0;
    find_digits(numbers, decimals == NO_LIMIT ? INFINITY : nearest_double(1, decimals), -decimals, digits, units, doubtful);
    for (int i = 0; i < BLOCK; i++) any |= doubtful[i] | is_special(numbers[i]);
    if (__builtin_expect(any, 0)) {
        for (int i = 0; i < BLOCK; i++)
            if (doubtful[i] && !is_special(numbers[i])) digits[i] = (int32_t)shortest_digits(bits_of(numbers[i]) & MAGNITUDE, &units[i]);
    }
    for (int i = 0; i < BLOCK; i++) digits[i] = bits_of(numbers[i]) & MAGNITUDE ? digits[i] : 0; /* masks make many zeros */
    for (int i = 0; i < BLOCK; i++) out->minus[i] = bits_of(numbers[i]) >> 31 & (uint32_t)(decimals == NO_LIMIT || digits[i]);
    write_digits(digits, units, out);
    for (int i = 0; i < BLOCK; i++) {
        int special = is_special(numbers[i]) & ((bits_of(numbers[i]) & MAGNITUDE) != 0);
        out->point[i] = special ? SPECIAL : digits[i] ? out->point[i] : 1;
    }
}

#endif
