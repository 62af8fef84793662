/* Writes float32 as nested lists: 1.5, 0.000001, 1234567.8, 1e-7, 1.1e+13. shortest.h finds the digits of 64 numbers at a time; here they
 * are put in order, again without a branch if a number has no exponent. */
#include "shortest.h"
#if defined(X86)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LONGEST 18       /* most characters of a number with its sign and comma */
#define OVERHANG 16      /* characters that may be written beyond the end */
#define FIRST_PLAIN (-5) /* positions of the point of numbers that are written without an exponent */
#define LAST_PLAIN 13

static uint8_t SHUFFLES[LAST_PLAIN - FIRST_PLAIN + 1][16]; /* which of its 16 characters a number's text consists of, by its point */

void prepare_writing(void)
{
    prepare_scales();
    for (int point = FIRST_PLAIN; point <= LAST_PLAIN; point++) {
        uint8_t *shuffle = SHUFFLES[point - FIRST_PLAIN];
        int length = 0, digit = 0;
        if (point <= 0) shuffle[length++] = ZERO;
        for (; digit < point; digit++) shuffle[length++] = digit < 9 ? (uint8_t)(DIGITS + digit) : ZERO;
        shuffle[length++] = POINT;
        for (int i = point; i < 0; i++) shuffle[length++] = ZERO;
        for (; length < 16; digit++) shuffle[length++] = digit < 9 ? (uint8_t)(DIGITS + digit) : ZERO;
    }
}

/* Writes nine digits with an exponent, without the zeros at their end. */
static char *write_scientific(const char *digits, int point, char *out)
{
    int count = 9, exponent = point - 1;
    while (count > 1 && digits[count - 1] == '0') count--;
    *out++ = digits[0];
    if (count > 1) {
        *out++ = '.';
        memcpy(out, digits + 1, 8);
        out += count - 1;
    }
    *out++ = 'e';
    *out++ = exponent < 0 ? '-' : '+';
    if (exponent < 0) exponent = -exponent;
    if (exponent > 9) *out++ = (char)('0' + exponent / 10);
    *out++ = (char)('0' + exponent % 10);
    return out;
}

/* Writes a subnormal, or null. */
static char *write_special(float number, int decimals, char *out)
{
    uint32_t bits = bits_of(number) & MAGNITUDE;
    if (bits >= INFINITE) {
        memcpy(out, "null", 4);
        return out + 4;
    }
    *out = '-';
    if (decimals == NO_LIMIT) out += bits_of(number) >> 31;
    if (decimals != NO_LIMIT) {
        memcpy(out, "0.0", 3);
        return out + 3;
    }
    char characters[9];
    int32_t unit, length = 9;
    uint32_t digits = shortest_digits(bits, &unit);
    for (; digits < 100000000; digits *= 10) length--;
    for (int i = 8; i >= 0; i--, digits /= 10) characters[i] = (char)('0' + digits % 10);
    return write_scientific(characters, length + unit, out);
}

/* Puts characters of `text` in order. Vector instructions exist for that. */
INLINE void shuffle_characters(const uint32_t *text, const uint8_t *shuffle, char *out, int use_vpshufb)
{
#if defined(X86)
    if (use_vpshufb) { /* as assembly, since intrinsics cannot be inlined into functions for several targets */
        __m128i characters = _mm_loadu_si128((const __m128i *)text);
        __asm__("vpshufb %1, %0, %0" : "+x"(characters) : "x"(_mm_loadu_si128((const __m128i *)shuffle)));
        _mm_storeu_si128((__m128i *)out, characters);
        return;
    }
#elif defined(__aarch64__)
    vst1q_u8((uint8_t *)out, vqtbl1q_u8(vld1q_u8((const uint8_t *)text), vld1q_u8(shuffle)));
    return;
#endif
    for (int i = 0; i < 16; i++) out[i] = ((const char *)text)[shuffle[i]];
}

INLINE char *write_plain(const uint32_t *text, int point, char *out, int use_vpshufb)
{
    uint64_t last8;
    memcpy(&last8, text + 1, 8);
    last8 ^= 0x3030303030303030u;
    int count = 9 - (__builtin_clzll(last8 | 1) >> 3) - !last8; /* digits, without the zeros at their end */
    int zeros = point < 1 ? 1 - point : 0, written = count > point + 1 ? count : point + 1;
    shuffle_characters(text, SHUFFLES[point - FIRST_PLAIN], out, use_vpshufb);
    return out + zeros + 1 + written;
}

/* Writes numbers of a block, each with a comma. */
INLINE char *write_numbers(const float *numbers, const block_of_text *from, int first, int count, int decimals, char *out, int use_vpshufb)
{
    for (int i = first; i < first + count; i++) {
        int point = from->point[i];
        if (__builtin_expect((unsigned)(point - FIRST_PLAIN) <= LAST_PLAIN - FIRST_PLAIN, 1)) {
            *out = '-';
            out = write_plain(from->text[i], point, out + from->minus[i], use_vpshufb);
        } else if (point == SPECIAL) {
            out = write_special(numbers[i], decimals, out);
        } else {
            *out = '-';
            out = write_scientific((const char *)from->text[i] + DIGITS, point, out + from->minus[i]);
        }
        *out++ = ',';
    }
    return out;
}

/* Ends a row: replaces the comma at its end by brackets, and opens the next row. `lists_written` counts the lists written at each
 * depth. */
static char *end_row(int rank, const size_t *shape, size_t *lists_written, char *out)
{
    int depth = rank - 1;
    out[-1] = ']';
    for (; depth > 0 && ++lists_written[depth - 1] == shape[depth - 1]; depth--) {
        lists_written[depth - 1] = 0;
        *out++ = ']';
    }
    if (!depth) return out;
    *out++ = ',';
    for (; depth < rank; depth++) *out++ = '[';
    return out;
}

/* Blocks continue across rows, which may be short. */
INLINE size_t write_as(const float *numbers, int rank, const size_t *shape, int decimals, char *out, int use_vpshufb)
{
    size_t lists_written[MAX_RANK] = {0}, left = shape[rank - 1], total = 1;
    char *start = out;
    block_of_text texts;
    float last[BLOCK] = {0};
    for (int i = 0; i < rank; i++) total *= shape[i];
    for (int i = 0; i < rank; i++) *out++ = '[';
    for (; total; total -= total < BLOCK ? total : BLOCK, numbers += BLOCK) {
        int count = total < BLOCK ? (int)total : BLOCK;
        const float *block = count < BLOCK ? memcpy(last, numbers, (size_t)count * sizeof(float)) : numbers;
        convert_block(block, decimals, &texts);
        for (int i = 0; i < count;) {
            int some = left < (size_t)(count - i) ? (int)left : count - i;
            out = write_numbers(block, &texts, i, some, decimals, out, use_vpshufb);
            i += some;
            left -= (size_t)some;
            if (left) continue;
            out = end_row(rank, shape, lists_written, out);
            left = shape[rank - 1];
        }
    }
    return (size_t)(out - start);
}

#ifdef X86
TARGET_AVX2 static size_t write_avx2(const float *numbers, int rank, const size_t *shape, int decimals, char *out)
{
    return write_as(numbers, rank, shape, decimals, out, 1);
}

TARGET_AVX512 static size_t write_avx512(const float *numbers, int rank, const size_t *shape, int decimals, char *out)
{
    return write_as(numbers, rank, shape, decimals, out, 1);
}
#endif

size_t write_list(const float *numbers, int rank, const size_t *shape, int decimals, char *out)
{
#ifdef X86
    if (variant == AVX512) return write_avx512(numbers, rank, shape, decimals, out);
    if (variant == AVX2) return write_avx2(numbers, rank, shape, decimals, out);
#endif
    return write_as(numbers, rank, shape, decimals, out, 0);
}

size_t text_capacity(int rank, const size_t *shape)
{
    size_t lists = 1, capacity = OVERHANG;
    for (int i = 0; i < rank; i++) {
        capacity += 3 * lists;
        lists *= shape[i];
    }
    return capacity + lists * LONGEST;
}
