/* The first 128 bits of powers of ten, computed when the module is loaded.
 *
 * 10^q = 5^q * 2^q, so its binary digits are those of 5^q. For q >= 0 that is an integer of at most 753 bits. For q < 0 they are those of
 * 2^WIDTH / 5^-q, found by dividing by 5 again and again: floor(floor(x / 5) / 5) = floor(x / 25), so no error builds up. Bits beyond the
 * first 128 are cut off; for -27 <= q < 0 the result is rounded up, as the algorithm in decimal.c requires. */
#include "numbers.h"

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

void prepare_powers(void)
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
