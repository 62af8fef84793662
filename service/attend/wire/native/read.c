/* Reads nested lists of numbers. The grammar is RFC 8259; a number becomes the nearest float64, as Python's float() does it, and then, in a
 * list of float32, the float32 nearest to that.
 *
 * The text ends in a NUL, which is no character of a list, so a check of each character is a check for the end of the text. */
#include "numbers.h"
#include <math.h>
#include <string.h>

#define MAX_DIGITS 19       /* that fit into 64 bits */
#define MAX_EXPONENT 100000 /* further digits cannot change the number: it is 0 or infinite */

static inline int is_digit(char c) { return (unsigned char)(c - '0') < 10; }

static inline const char *skip_blanks(const char *p)
{
    while (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t') p++;
    return p;
}

/* Eight characters, the first one in the lowest byte. */
static inline uint64_t load8(const char *p)
{
    uint64_t characters;
    memcpy(&characters, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    characters = __builtin_bswap64(characters);
#endif
    return characters;
}

/* The top bit of every byte that is not a digit. */
static inline uint64_t non_digits(uint64_t characters)
{
    uint64_t values = characters ^ 0x3030303030303030u;
    return (((values & 0x7f7f7f7f7f7f7f7fu) + 0x7676767676767676u) | values) & 0x8080808080808080u;
}

/* The number of eight digits: neighbours are joined to pairs, pairs to fours, fours to eight. Bytes of 0 count as the digit 0. */
static inline uint64_t value_of_8(uint64_t digits)
{
    digits = (digits & 0x0f0f0f0f0f0f0f0fu) * (256 * 10 + 1) >> 8;
    digits = (digits & 0x00ff00ff00ff00ffu) * (65536 * 100 + 1) >> 16;
    return (digits & 0x0000ffff0000ffffu) * ((uint64_t)10000 << 32 | 1) >> 32;
}

/* Appends the digits at p to `value`, which overflows unnoticed, and returns where they end. */
static inline const char *read_digits(const char *p, const char *end, uint64_t *value)
{
    static const uint64_t TENS[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};
    while (end - p >= 8) {
        uint64_t characters = load8(p), others = non_digits(characters);
        if (others) {
            unsigned count = (unsigned)__builtin_ctzll(others) / 8;
            *value = *value * TENS[count] + value_of_8(characters << (56 - 8 * count) << 8);
            return p + count;
        }
        *value = *value * TENS[8] + value_of_8(characters);
        p += 8;
    }
    for (; is_digit(*p); p++) *value = *value * 10 + (uint64_t)(*p - '0');
    return p;
}

static inline const char *read_exponent(const char *p, int64_t *exponent)
{
    int negative = *p == '-';
    int64_t value = 0;
    p += *p == '-' || *p == '+';
    if (!is_digit(*p)) return NULL;
    for (; is_digit(*p); p++)
        if (value < MAX_EXPONENT) value = value * 10 + (*p - '0');
    *exponent += negative ? -value : value;
    return p;
}

/* Whether more digits count than fit into 64 bits. Zeros at the beginning do not count. */
static int too_many_digits(const char *first, const char *end)
{
    if (end - first <= MAX_DIGITS) return 0;
    const char *point = memchr(first, '.', (size_t)(end - first));
    while (*first == '0' || *first == '.') first++;
    return end - first - (point && point >= first) > MAX_DIGITS;
}

/* The number at p. Returns what follows it; NULL if there is no number, or one of too many digits. */
static inline const char *read_number(const char *p, const char *end, double *result)
{
    int negative = *p == '-';
    const char *first = p += negative;
    uint64_t digits = (uint64_t)(*p - '0');
    int64_t exponent = 0;
    if (!is_digit(*p++)) return NULL;
    if (is_digit(*p)) {
        if (!digits) return NULL; /* a leading zero */
        p = read_digits(p, end, &digits);
    }
    if (*p == '.') {
        const char *fraction = ++p;
        p = read_digits(p, end, &digits);
        if (p == fraction) return NULL;
        exponent = fraction - p;
    }
    if (__builtin_expect(too_many_digits(first, p), 0)) return NULL;
    if (*p == 'e' || *p == 'E') p = read_exponent(p + 1, &exponent);
    double value = nearest_double(digits, exponent);
    *result = negative && (digits || p != first + 1) ? -value : value; /* -0 is an integer, and 0 */
    return p;
}

/* Literals that some lists may contain; the caller decides which. */
static const char *read_literal(const char *p, double *result, int *literals)
{
    static const struct {
        const char *text;
        size_t length;
        double value;
        int kind;
    } LITERALS[] = {{"true", 4, 1, HAS_BOOLEANS}, {"false", 5, 0, HAS_BOOLEANS}, {"\"-inf\"", 6, -HUGE_VAL, HAS_MINUS_INFINITY}};
    for (int i = 0; i < 3; i++) {
        if (strncmp(p, LITERALS[i].text, LITERALS[i].length)) continue;
        *result = LITERALS[i].value;
        *literals |= LITERALS[i].kind;
        return p + LITERALS[i].length;
    }
    return NULL;
}

/* Appends a number. Returns whether there was room and it is finite in the datatype, or negative infinity that was read as a literal. */
static inline int append(list_of_numbers *into, double value, int is_literal)
{
    double stored = into->is_float32 ? (float)value : value;
    if (into->count == into->capacity || (isinf(stored) && !is_literal)) return 0;
    if (into->is_float32)
        ((float *)into->numbers)[into->count++] = (float)value;
    else
        ((double *)into->numbers)[into->count++] = value;
    return 1;
}

const char *read_row(const char *p, const char *end, list_of_numbers *into)
{
    for (;;) {
        double value;
        p = skip_blanks(p);
        int is_literal = *p > '9' || *p == '"';
        p = is_literal ? read_literal(p, &value, &into->literals) : read_number(p, end, &value);
        if (!p || !append(into, value, is_literal)) return NULL;
        if (*p != ',') p = skip_blanks(p);
        if (*p == ']') return p + 1;
        if (*p++ != ',') return NULL;
    }
}

/* What follows the list that ends before p: closes the lists around it that end there too. `lengths` are those of the open lists so far, in
 * which `depth` lists are open. Returns the beginning of the next list or the end of the outermost one; NULL for an irregular list. */
static const char *close_lists(const char *p, list_of_numbers *into, size_t *lengths, int *depth)
{
    for (;;) {
        int level = --*depth;
        if (!into->shape[level]) into->shape[level] = lengths[level];
        if (lengths[level] != into->shape[level]) return NULL;
        if (!level) return p;
        lengths[level - 1]++;
        p = skip_blanks(p);
        if (*p == ',') return skip_blanks(p + 1);
        if (*p++ != ']') return NULL;
    }
}

const char *read_list(const char *text, const char *p, const char *end, list_of_numbers *into)
{
    size_t lengths[MAX_RANK] = {0};
    int depth = 0;
    memset(into->shape, 0, sizeof into->shape);
    into->rank = into->literals = 0;
    into->count = into->lists = 0;
    do { /* a list or a row of numbers begins here */
        while (*p == '[') {
            if (depth == MAX_RANK || (into->rank && depth == into->rank) || into->lists++ == into->max_lists) return NULL;
            lengths[depth++] = 0;
            p = skip_blanks(p + 1);
        }
        if (!depth || (into->rank && depth != into->rank)) return NULL;
        into->rank = depth;
        size_t before = into->count;
#ifdef X86
        p = variant == PORTABLE ? read_row(p, end, into) : read_row_avx2(text, p, end, into);
#else
        p = read_row(p, end, into);
#endif
        if (!p) return NULL;
        lengths[depth - 1] = into->count - before;
        p = close_lists(p, into, lengths, &depth);
    } while (p && depth);
    return p;
}
