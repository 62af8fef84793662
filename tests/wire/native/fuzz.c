/* Reads random and damaged texts, and writes random floats, in memory of exactly the promised size, so that the sanitizers see every access
 * beyond it. All variants must agree, numbers must be those of strtod(), and what was written must be read back.
 *
 *     gcc -g -fsanitize=address,undefined -fno-sanitize-recover=all -Iservice/wire/native tests/wire/native/fuzz.c \
 *         service/attend/wire/native/{numbers,read,read_avx2,write}.c -o fuzz && ./fuzz SECONDS SEED */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "numbers.h"

static uint64_t state;
static unsigned long accepted, refused, written;

static uint32_t draw(uint32_t below) /* SplitMix64 */
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) >> 32) % below;
}

static void fail(const char *what, const char *text)
{
    fprintf(stderr, "variant %s: %s: %.2000s\n", VARIANT_NAMES[variant], what, text);
    abort();
}

static float random_float(void)
{
    uint32_t bits = draw(2) ? draw(0xffffffffu) : (draw(2) << 31 | (100 + draw(50)) << 23 | draw(1 << 23));
    float value;
    memcpy(&value, &bits, 4);
    return draw(8) ? value : (float)((int)draw(2000) - 1000) / 8;
}

static char *append_number(char *out, int format)
{
    static const char *const FORMATS[] = {"%.9g", "%.17g", "%.8e", "%.6f", "%.0f", "%.3G", "%.19g", "%.25g"};
    double value = draw(3) ? (double)random_float() : (double)random_float() * random_float();
    if (!isfinite(value)) value = 1;
    return out + sprintf(out, FORMATS[draw(40) ? format : (int)draw(8)], value);
}

/* A list of some depth and regular lengths, mostly; returns its end. */
static char *append_list(char *out, int depth, const int *lengths, int format)
{
    *out++ = '[';
    for (int i = 0; i < lengths[0]; i++) {
        if (i) *out++ = ',';
        if (i && format % 2) *out++ = ' ';
        out = depth > 1 ? append_list(out, depth - 1, lengths + 1, format) : append_number(out, format);
    }
    *out++ = ']';
    return out;
}

static void damage(char *text, size_t *size)
{
    static const char BYTES[] = "0123456789.,-+eE[] \n\"tfn{}\\\0\xff";
    size_t place = draw((uint32_t)*size);
    if (draw(3)) {
        text[place] = BYTES[draw(sizeof BYTES)];
    } else {
        memmove(text + place, text + place + 1, *size - place - 1);
        --*size;
    }
}

/* Compares what was read with strtod(), number by number. */
static void compare(const char *text, const list_of_numbers *list)
{
    size_t count = 0;
    for (const char *p = text; *p && count < list->count;) {
        if (strchr("[], \n", *p)) {
            p++;
            continue;
        }
        char *end = (char *)p;
        double expected = *p == 't' ? 1 : *p == 'f' ? 0 : *p == '"' ? -HUGE_VAL : strtod(p, &end);
        if (end == p) end += strcspn(p, "], ");
        if (!strcspn(p, "-") && end == p + 2 && p[1] == '0') expected = 0; /* -0 is an integer */
        if (list->is_float32 ? memcmp((float *)list->numbers + count, &(float){(float)expected}, 4)
                         : memcmp((double *)list->numbers + count, &expected, 8))
            fail("another number", p);
        p = end;
        count++;
    }
    if (count != list->count) fail("another count", text);
}

static void read_with_all(const char *source, size_t size)
{
    char *text = malloc(size + 1);
    memcpy(text, source, size);
    text[size] = 0;
    size_t capacity = 1;
    for (size_t i = 0; i < size; i++) capacity += text[i] == ',';
    for (int is_float32 = 0; is_float32 < 2; is_float32++) {
        const char *first_end = NULL;
        int is_first = 1;
        for (variant = 0; variant < VARIANTS; variant++) {
            if (!can_run(variant)) continue;
            void *numbers = malloc(capacity * (is_float32 ? 4 : 8));
            list_of_numbers list = {.numbers = numbers, .capacity = capacity, .max_lists = 1000, .is_float32 = is_float32};
            const char *end = read_list(text, text, text + size, &list);
            if (is_first) first_end = end;
            is_first = 0;
            if (end != first_end) fail("variants disagree", text);
            if (end) compare(text, &list);
            *(end ? &accepted : &refused) += 1;
            free(list.numbers);
        }
    }
    free(text);
}

static void write_with_all(int rank, const size_t *shape)
{
    size_t count = 1, first_size = 0;
    for (int i = 0; i < rank; i++) count *= shape[i];
    float *numbers = malloc(count * 4);
    int decimals = draw(2) ? NO_LIMIT : (int)draw(EXACT_POWER + 1), finite = 1;
    for (size_t i = 0; i < count; i++) {
        numbers[i] = random_float();
        finite &= isfinite(numbers[i]) != 0;
    }
    char *first = NULL;
    for (variant = 0; variant < VARIANTS; variant++) {
        if (!can_run(variant)) continue;
        char *out = malloc(text_capacity(rank, shape));
        size_t size = write_list(numbers, rank, shape, decimals, out);
        if (first && (size != first_size || memcmp(first, out, size))) fail("variants write differently", out);
        if (!first) first = malloc(size), first_size = size, memcpy(first, out, size);
        free(out);
    }
    read_with_all(first, first_size);
    if (finite && decimals == NO_LIMIT) {
        char *text = calloc(first_size + 1, 1);
        memcpy(text, first, first_size);
        list_of_numbers list = {.numbers = malloc(count * 4), .capacity = count, .max_lists = count * 4 + 4, .is_float32 = 1};
        variant = PORTABLE;
        if (!read_list(text, text, text + first_size, &list) || memcmp(list.numbers, numbers, count * 4)) fail("not read back", text);
        free(list.numbers);
        free(text);
    }
    free(first);
    free(numbers);
    written++;
}

int main(int count, char **arguments)
{
    static char text[1 << 20];
    time_t stop = time(NULL) + atoi(count > 1 ? arguments[1] : "10");
    state = strtoull(count > 2 ? arguments[2] : "1", NULL, 0);
    prepare_numbers();
    while (time(NULL) < stop) {
        int depth = 1 + (int)draw(3), lengths[3];
        for (int i = 0; i < 3; i++) lengths[i] = 1 + (int)draw(i == depth - 1 ? 150 : 4);
        size_t size = (size_t)(append_list(text, depth, lengths, (int)draw(8)) - text), shape[3];
        read_with_all(text, size);
        for (int i = (int)draw(4); i > 0 && size > 1; i--) {
            damage(text, &size);
            read_with_all(text, size);
        }
        for (int i = 0; i < 3; i++) shape[i] = (size_t)lengths[i];
        write_with_all(depth, shape);
    }
    printf("%lu texts read, %lu refused, %lu arrays written\n", accepted, refused, written);
    return 0;
}
