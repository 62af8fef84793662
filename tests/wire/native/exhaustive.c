/* Compares the digits of every positive float32 from FIRST to LAST (their bits) with those that the exact algorithm finds. Those of the
 * fastest variant that can run here, or of each of the others.
 *
 *     gcc -O3 -ffp-contract=off -Iservice/attend/wire/native tests/wire/native/exhaustive.c \
 *         service/attend/wire/native/{numbers,read,read_avx2,write}.c -o exhaustive && ./exhaustive fastest 0 0x80000000 */
#include "shortest.h"
#include <stdio.h>
#include <stdlib.h>

static void convert_portable(const float *numbers, block_of_text *texts) { convert_block(numbers, NO_LIMIT, texts); }
#ifdef X86
TARGET_AVX2 static void convert_avx2(const float *numbers, block_of_text *texts) { convert_block(numbers, NO_LIMIT, texts); }
TARGET_AVX512 static void convert_avx512(const float *numbers, block_of_text *texts) { convert_block(numbers, NO_LIMIT, texts); }
static void (*const CONVERT[VARIANTS])(const float *, block_of_text *) = {convert_avx512, convert_avx2, convert_portable};
#else
static void (*const CONVERT[VARIANTS])(const float *, block_of_text *) = {[PORTABLE] = convert_portable};
#endif

/* Whether the text of number `i` has the exact digits. */
static int is_exact(uint32_t bits, const block_of_text *texts, int i)
{
    int32_t unit, length = 9;
    uint32_t digits = shortest_digits(bits, &unit), found = 0;
    for (; digits < 100000000; digits *= 10) length--;
    const char *text = (const char *)texts->text[i] + DIGITS;
    for (int j = 0; j < 9; j++) found = found * 10 + (uint32_t)(text[j] - '0');
    return found == digits && texts->point[i] == length + unit;
}

/* How many numbers have wrong digits. */
static uint32_t wrong_digits(uint32_t first, uint32_t last)
{
    uint32_t wrong = 0;
    block_of_text texts;
    for (uint32_t bits = first; bits < last; bits += BLOCK) {
        float numbers[BLOCK];
        for (uint32_t i = 0; i < BLOCK; i++) memcpy(&numbers[i], &(uint32_t){bits + i}, 4);
        CONVERT[variant](numbers, &texts);
        for (int i = 0; i < BLOCK; i++) wrong += !is_special(numbers[i]) && !is_exact(bits + (uint32_t)i, &texts, i);
    }
    printf("%s, %08x to %08x: %u wrong\n", VARIANT_NAMES[variant], first, last, wrong);
    return wrong;
}

int main(int count, char **arguments)
{
    if (count != 4) return 2;
    int others = strcmp(arguments[1], "fastest") != 0, fastest = 0;
    uint32_t first = (uint32_t)strtoul(arguments[2], NULL, 0), last = (uint32_t)strtoul(arguments[3], NULL, 0), wrong = 0;
    while (!can_run(fastest)) fastest++;
    prepare_numbers();
    prepare_scales();
    for (variant = fastest + others; variant < (others ? VARIANTS : fastest + 1); variant++) wrong += wrong_digits(first, last);
    return wrong != 0;
}
