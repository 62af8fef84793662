/* Reads rows of numbers with 256-bit vectors: first finds the commas of up to 64 numbers, then converts these numbers without a branch.
 *
 * A number's 32 characters up to its comma are one vector. Those before the number are cleared; the digits before the point move up by one,
 * into its place: they are taken from a vector loaded one character earlier. Three multiply-adds turn 32 digits into four integers of 8.
 * Numbers of up to 19 digits, with or without an exponent of two digits (1.5e-07, as C and Python write it), are simple. A row with
 * anything else is read by read_row(), from that point on. */
#include "numbers.h"
#ifdef X86
#include <immintrin.h>
#include <math.h>
#include <string.h>

#define WINDOW 32      /* characters of a number that are looked at, */
#define NO_POINT WINDOW /* and where its point is among them if it has none */
#define MARGIN 64      /* characters that must exist on either side of what is read */

/* Kinds of a number: not simple; simple, unless the first digit is 0 (a leading zero, or -0, which as an integer is 0). */
enum { IRREGULAR = 1, FIRST_DIGIT_NOT_ZERO = 2 };

typedef struct {
    uint32_t digits[BLOCK][4], minus[BLOCK]; /* eight digits each, the first ones first */
    int32_t point[BLOCK], exponent[BLOCK];
} block_of_decimals;

static uint8_t MASKS[3 * WINDOW + 1];
#define LAST(count) (const __m256i *)(MASKS + 1 + (count)) /* a vector that is true in its last bytes, -1 to 63 of them */
static uint8_t KINDS[2][WINDOW][2 * WINDOW]; /* by minus sign, number of other characters, and position of the point */
static double FACTORS[2][2 * EXACT_POWER + 1]; /* by minus sign: 10^exponent for positive exponents, 1 for others, negative with a minus */

void prepare_reading(void)
{
    memset(MASKS + 1 + WINDOW, 255, 2 * WINDOW);
    for (int count = 0; count < WINDOW; count++)
        for (int point = 0; point <= WINDOW; point++) {
            int before = point - (WINDOW - count);
            int irregular = before < 1 || point == WINDOW - 1;
            KINDS[0][count][point] = (uint8_t)(irregular * IRREGULAR | (before > 1) * FIRST_DIGIT_NOT_ZERO);
            KINDS[1][count][point] = (uint8_t)(irregular * IRREGULAR | (before > 1 || point == NO_POINT) * FIRST_DIGIT_NOT_ZERO);
        }
    for (int i = 0; i <= 2 * EXACT_POWER; i++) {
        FACTORS[0][i] = i < EXACT_POWER ? 1 : POWERS_EXACT[i - EXACT_POWER];
        FACTORS[1][i] = -FACTORS[0][i];
    }
}

/* Finds the next commas from p on. Returns how many numbers end, the last one perhaps at the bracket `close`. */
TARGET_AVX2 static inline int find_ends(const char *p, const char *close, const char **ends, uint32_t *has_exponents)
{
    int count = 0;
    const __m256i comma = _mm256_set1_epi8(','), exponent = _mm256_set1_epi8('e'), small = _mm256_set1_epi8('a' - 'A');
    __m256i exponents = _mm256_setzero_si256();
    for (; p < close && count < BLOCK; p += 64) {
        __m256i first = _mm256_loadu_si256((const __m256i *)p), second = _mm256_loadu_si256((const __m256i *)(p + 32));
        uint64_t found = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(second, comma));
        found = found << 32 | (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(first, comma));
        exponents = _mm256_or_si256(exponents, _mm256_cmpeq_epi8(_mm256_or_si256(first, small), exponent));
        exponents = _mm256_or_si256(exponents, _mm256_cmpeq_epi8(_mm256_or_si256(second, small), exponent));
        if (close - p < 64) found &= ((uint64_t)1 << (close - p)) - 1;
        const char **next = ends + count, **last = next + __builtin_popcountll(found);
        for (; next < last; next += 8) /* eight at once, since their number cannot be predicted */
            for (int i = 0; i < 8; i++, found &= found - 1) next[i] = p + _tzcnt_u64(found);
        count = (int)(last - ends);
    }
    *has_exponents = (uint32_t)_mm256_movemask_epi8(exponents);
    if (count >= BLOCK) return BLOCK;
    ends[count++] = close;
    return count;
}

/* The exponent of two digits that ends at *end, which moves before it; 0 if there is none. */
TARGET_AVX2 static inline int32_t take_exponent(const char **end)
{
    uint32_t tail;
    memcpy(&tail, *end - 4, 4);
    uint32_t tens = (tail >> 16 & 0xff) - '0', ones = (tail >> 24) - '0', sign = tail >> 8 & 0xff;
    uint32_t found = ((tail & 0xdf) == 'E') & (tens < 10) & (ones < 10) & ((sign == '-') | (sign == '+'));
    *end -= 4 * found;
    int32_t exponent = (int32_t)((tens * 10 + ones) & (0 - found));
    return sign == '-' ? -exponent : exponent;
}

/* 32 digits, as values of 0 to 9, as four integers of eight. */
TARGET_AVX2 static inline void join_digits(__m256i digits, uint32_t joined[4])
{
    __m256i pairs = _mm256_maddubs_epi16(digits, _mm256_set1_epi16(1 << 8 | 10));
    __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 << 16 | 100));
    __m256i eights = _mm256_madd_epi16(_mm256_packus_epi32(fours, fours), _mm256_set1_epi32(1 << 16 | 10000));
    _mm_storeu_si128((__m128i *)joined, _mm256_castsi256_si128(_mm256_permute4x64_epi64(eights, 2 << 2)));
}

/* Number i, which is the text from `start` to `end`. Returns 0 if it is simple. */
TARGET_AVX2 static inline uint64_t read_simple(const char *start, const char *end, int i, block_of_decimals *into)
{
    const __m256i zeros = _mm256_set1_epi8('0'), nine = _mm256_set1_epi8(9), full_stop = _mm256_set1_epi8('.' - '0');
    uint64_t minus = *start == '-';
    into->minus[i] = (uint32_t)minus;
    start += minus;
    uint64_t length = (uint64_t)(end - start), kept = length & 31;
    __m256i near = _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)(end - WINDOW)), zeros);
    __m256i far = _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)(end - WINDOW - 1)), zeros);
    uint32_t digits = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(near, nine), near));
    uint32_t points = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(near, full_stop));
    uint32_t others = ~digits & ~(uint32_t)(0xffffffffu >> kept), point = _tzcnt_u32(others);
    near = _mm256_and_si256(near, _mm256_loadu_si256(LAST(kept)));
    far = _mm256_and_si256(far, _mm256_loadu_si256(LAST(kept - 1)));
    __m256i after_point = _mm256_loadu_si256(LAST((31 - point) & 63)); /* all, if there is no point */
    join_digits(_mm256_blendv_epi8(far, near, after_point), into->digits[i]);
    into->point[i] = (int32_t)point;
    uint8_t kind = KINDS[minus][kept][point];
    return length >> 5 | (others ^ (_blsi_u32(others) & points)) | (kind & IRREGULAR) | (kind / FIRST_DIGIT_NOT_ZERO & (*start == '0'));
}

/* Converts numbers. Returns 0 if one of them has more than 19 digits. */
TARGET_AVX2 static inline int convert(block_of_decimals *from, int count, double *values)
{
    uint32_t too_long = 0, inexact = 0;
    for (int i = 0; i < count; i++) {
        int32_t fraction = from->point[i] == NO_POINT ? 0 : WINDOW - 1 - from->point[i];
        from->exponent[i] -= fraction;
        too_long |= from->digits[i][0] | (from->digits[i][1] > 999);
        inexact |= from->digits[i][1] | (from->digits[i][2] >= EXACT_DIGITS / 100000000);
        inexact |= (from->exponent[i] < -EXACT_POWER) | (from->exponent[i] > EXACT_POWER);
    }
    for (int i = 0; i < count && !inexact; i++) values[i] = (double)(int32_t)from->digits[i][2] * 1e8 + (double)(int32_t)from->digits[i][3];
    for (int i = 0; i < count; i++) {
        const uint32_t *digits = from->digits[i];
        int32_t exponent = from->exponent[i];
        if (inexact)
            values[i] = nearest_double(((uint64_t)digits[1] * 100000000 + digits[2]) * 100000000 + digits[3], exponent) *
                        FACTORS[from->minus[i]][0];
        else
            values[i] = values[i] * FACTORS[from->minus[i]][EXACT_POWER + exponent] / FACTORS[0][EXACT_POWER - exponent];
    }
    return !too_long;
}

/* The numbers of a block, of which the first one begins at `start`. Returns 0 if all are simple. */
TARGET_AVX2 INLINE uint64_t read_numbers(const char *start, const char **ends, int count, int has_exponents, block_of_decimals *into)
{
    uint64_t irregular = 0;
    for (int i = 0; i < count; i++) {
        const char *end = ends[i];
        start += *start == ' ';
        into->exponent[i] = has_exponents ? take_exponent(&end) : 0;
        irregular |= read_simple(start, end, i, into);
        start = ends[i] + 1;
    }
    return irregular;
}

/* Reads up to 64 numbers, and moves *p to the comma or bracket after the last one. Returns how many; 0 if one is not simple. */
TARGET_AVX2 static int read_block(const char **p, const char *close, double *values)
{
    const char *ends[2 * BLOCK + 8], *start = *p;
    block_of_decimals found;
    uint32_t has_exponents;
    int count = find_ends(start, close, ends, &has_exponents);
    uint64_t irregular = has_exponents ? read_numbers(start, ends, count, 1, &found) : read_numbers(start, ends, count, 0, &found);
    *p = ends[count - 1];
    return irregular || !convert(&found, count, values) ? 0 : count;
}

/* Appends the numbers. Returns whether there was room and they are finite in the datatype. */
TARGET_AVX2 static int append_block(const double *values, int count, list_of_numbers *into)
{
    int infinite = 0;
    if (into->capacity - into->count < (size_t)count) return 0;
    if (into->is_float32) {
        float *numbers = (float *)into->numbers + into->count;
        for (int i = 0; i < count; i++) {
            numbers[i] = (float)values[i];
            infinite |= isinf(numbers[i]) != 0;
        }
    } else {
        memcpy((double *)into->numbers + into->count, values, (size_t)count * sizeof(double));
        for (int i = 0; i < count; i++) infinite |= isinf(values[i]) != 0;
    }
    into->count += (size_t)count;
    return !infinite;
}

TARGET_AVX2 const char *read_row_avx2(const char *text, const char *p, const char *end, list_of_numbers *into)
{
    const char *close = memchr(p, ']', (size_t)(end - p));
    double values[BLOCK];
    if (!close || end - close < MARGIN || p - text < MARGIN) return read_row(p, end, into);
    for (;;) {
        const char *start = p;
        int count = read_block(&p, close, values);
        if (!count) return read_row(start, end, into);
        if (!append_block(values, count, into)) return NULL;
        if (p++ == close) return p;
    }
}
#endif
