/* Nested lists of numbers as JSON text <-> arrays of floats. Nothing here calls Python, allocates memory or depends on the locale.
 *
 * The reader returns NULL for anything irregular; Python then parses the text and reports the fault. Both directions handle up to 64 numbers
 * at a time in loops without branches, since a branch that depends on digits is mispredicted half of the time. */
#ifndef NUMBERS_H
#define NUMBERS_H
#include <stddef.h>
#include <stdint.h>

#define MAX_RANK 4
#define BLOCK 64 /* numbers that are converted together */
#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define X86 1
#define TARGET_AVX2 __attribute__((target("avx2,bmi")))
#define TARGET_AVX512 __attribute__((target("avx2,bmi,avx512f,avx512vl,avx512dq,avx512bw")))
#endif

/* numbers.c */
enum { AVX512, AVX2, PORTABLE, VARIANTS }; /* instruction sets, the fastest first */
extern const char *const VARIANT_NAMES[VARIANTS];
extern int variant; /* in use; the others run only if can_run() */
int can_run(int which);
void prepare_numbers(void); /* must be called before anything else */

/* 10^q for LOWEST_POWER <= q <= HIGHEST_POWER, as the first 128 bits of its binary digits. */
#define LOWEST_POWER (-342)
#define HIGHEST_POWER 324
typedef struct {
    uint64_t high, low;
} power_of_ten;
extern power_of_ten POWERS[HIGHEST_POWER - LOWEST_POWER + 1];

#define EXACT_DIGITS ((uint64_t)1 << 53) /* a float64 represents every integer up to here, */
#define EXACT_POWER 22                   /* and the powers of ten up to here: one product or quotient of the two is rounded once */
extern const double POWERS_EXACT[EXACT_POWER + 1];
double eisel_lemire(uint64_t digits, int64_t exponent);

/* digits x 10^exponent as the nearest float64, ties to even; infinite beyond its range. */
static inline double nearest_double(uint64_t digits, int64_t exponent)
{
    if (digits <= EXACT_DIGITS && exponent >= -EXACT_POWER && exponent <= EXACT_POWER)
        return exponent < 0 ? (double)(int64_t)digits / POWERS_EXACT[-exponent] : (double)(int64_t)digits * POWERS_EXACT[exponent];
    return eisel_lemire(digits, exponent);
}

/* read.c */
typedef struct {
    void *numbers; /* memory for `capacity` of them */
    size_t capacity, count, lists, max_lists, shape[MAX_RANK];
    int rank, is_float32; /* the numbers are float32, else float64 */
    int literals;     /* which were read: HAS_BOOLEANS, HAS_MINUS_INFINITY */
} list_of_numbers;
enum { HAS_BOOLEANS = 1, HAS_MINUS_INFINITY = 2 }; /* true or false, read as 1 and 0; "-inf" */

/* Reads the list that begins at `start`, in a text that begins at `text` and has a NUL at `end`. Returns where the list ends; NULL if it is
 * no regular list of numbers that are finite in the datatype, of at most 19 significant digits. */
const char *read_list(const char *text, const char *start, const char *end, list_of_numbers *into);

/* Reads numbers with commas between them, and the bracket that closes their list. Returns what follows, or NULL. */
const char *read_row(const char *position, const char *end, list_of_numbers *into);

#ifdef X86
/* read_avx2.c: as read_row. */
void prepare_reading(void);
const char *read_row_avx2(const char *text, const char *position, const char *end, list_of_numbers *into);
#endif

/* write.c: writes float32 as nested lists of that shape, in the fewest digits that are read back as the same float32; infinities and NaN
 * as null. `decimals`: the most digits after the point, or NO_LIMIT. `out` has text_capacity() bytes. Returns how many were written. */
#define NO_LIMIT (-1)
void prepare_writing(void);
size_t text_capacity(int rank, const size_t *shape);
size_t write_list(const float *numbers, int rank, const size_t *shape, int decimals, char *out);

#endif
