/* The computation of a block of pages.h for one instruction set; see kernel.h. */
#include "pages.h"
#include "vectors.h"

enum { VALUES_PER_TILE = 64 }; /* values that stay in the fastest cache while the heads of a group are computed */

/* The sum of products of numbers first to end. */
INLINE float product(const float *a, const float *b, int first, int end)
{
    float sum = 0;
    for (int j = first; j < end; j++) sum += a[j] * b[j];
    return sum;
}

INLINE void block_scores(const struct block *block, float (*scores)[KEYS_PER_BLOCK], int width)
{
    const int whole = width / LANES * LANES; /* numbers of a row that fill vectors */
    for (int first = 0; first < block->rows; first += LANES)
        for (int head = 0; head < block->group; head++) {
            const float *query = block->query + head * width;
            vector sums[LANES], rest = {0};
            for (int i = 0; i < LANES; i++) {
                const float *key = block->key + (size_t)(first + i < block->rows ? first + i : block->rows - 1) * width;
                sums[i] = (vector){0};
                for (int j = 0; j < whole; j += LANES) sums[i] += load(query + j) * load(key + j);
                if (whole < width) rest[i] = product(query, key, whole, width);
            }
            store(scores[head] + first, (whole ? sums_of(sums) + rest : rest) * block->scale);
        }
    if (block->bias)
        for (int head = 0; head < block->group; head++)
            for (int row = 0; row < block->rows; row++) scores[head][row] += block->bias[head * block->bias_stride + row];
}

/* Replace scores by exp(score - m), and write m and their sum l. */
INLINE void block_exponentials(float *scores, int rows, float *m_and_l)
{
    for (int row = rows; row % LANES; row++) scores[row] = -INFINITY;
    vector largest = load(scores), sums = {0};
    for (int row = LANES; row < rows; row += LANES) largest = choose(load(scores + row) > largest, load(scores + row), largest);
    m_and_l[0] = largest_of(largest);
    for (int row = 0; row < rows; row += LANES) {
        const vector e = exponential(load(scores + row) - m_and_l[0]);
        store(scores + row, e);
        sums += e;
    }
    m_and_l[1] = sum_of(sums);
}

INLINE void block_values(const struct block *block, float (*scores)[KEYS_PER_BLOCK], int width)
{
    for (int first = 0; first < block->rows; first += VALUES_PER_TILE)
        for (int head = 0; head < block->group; head++) {
            const int end = first + VALUES_PER_TILE < block->rows ? first + VALUES_PER_TILE : block->rows;
            float *acc = block->acc_m_l + head * (width + 2);
            vector sums[WIDEST_HEAD / LANES];
            for (int j = 0; j < width / LANES; j++) sums[j] = first ? load(acc + j * LANES) : (vector){0};
            for (int row = first; row < end; row++)
                for (int j = 0; j < width / LANES; j++) sums[j] += scores[head][row] * load(block->value + (size_t)row * width + j * LANES);
            for (int j = 0; j < width / LANES; j++) store(acc + j * LANES, sums[j]);
            const int whole = width / LANES * LANES;
            float rest[LANES]; /* sums of the numbers of a row that fill no vector */
            for (int j = 0; j < width - whole; j++) rest[j] = first ? acc[whole + j] : 0;
            for (int row = first; row < end; row++)
                for (int j = 0; j < width - whole; j++) rest[j] += scores[head][row] * block->value[(size_t)row * width + whole + j];
            for (int j = 0; j < width - whole; j++) acc[whole + j] = rest[j];
        }
}

INLINE void attend_rows(const struct block *block, int width)
{
    float scores[MAX_GROUP][KEYS_PER_BLOCK];
    block_scores(block, scores, width);
    for (int head = 0; head < block->group; head++)
        block_exponentials(scores[head], block->rows, block->acc_m_l + head * (width + 2) + width);
    block_values(block, scores, width);
}

/* Common widths are constants, whose sums stay in registers: that halves the time. */
INLINE void attend_block(const struct block *block)
{
    if (block->width == 64)
        attend_rows(block, 64);
    else if (block->width == 128)
        attend_rows(block, 128);
    else if (block->width == 8)
        attend_rows(block, 8);
    else
        attend_rows(block, block->width);
}
