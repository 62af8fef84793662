/* The computation of a block of pages.h for one instruction set; see kernel.h. */
#include "pages.h"
#include "vectors.h"

enum { TILE_ROWS = 64 }; /* values that stay in the fastest cache while the heads of a group are computed */

INLINE void block_scores(const struct block *block, float (*scores)[BLOCK_ROWS], int width)
{
    for (int first = 0; first < block->rows; first += LANES)
        for (int head = 0; head < block->group; head++) {
            const float *query = block->query + head * width;
            vector sums[LANES];
            for (int i = 0; i < LANES; i++) {
                const float *key = block->key + (size_t)(first + i < block->rows ? first + i : block->rows - 1) * width;
                sums[i] = (vector){0};
                for (int j = 0; j < width; j += LANES) sums[i] += load(query + j) * load(key + j);
            }
            store(scores[head] + first, sums_of(sums) * block->scale);
        }
}

/* Replace scores by exp(score - most), and write `most` and the sum of the exponentials. */
INLINE void block_exponentials(float *scores, int rows, float *most_and_sum)
{
    for (int row = rows; row % LANES; row++) scores[row] = -INFINITY;
    vector largest = load(scores), sums = {0};
    for (int row = LANES; row < rows; row += LANES) largest = choose(load(scores + row) > largest, load(scores + row), largest);
    most_and_sum[0] = largest_of(largest);
    for (int row = 0; row < rows; row += LANES) {
        const vector e = exponential(load(scores + row) - most_and_sum[0]);
        store(scores + row, e);
        sums += e;
    }
    most_and_sum[1] = sum_of(sums);
}

INLINE void block_values(const struct block *block, float (*scores)[BLOCK_ROWS], int width)
{
    for (int first = 0; first < block->rows; first += TILE_ROWS)
        for (int head = 0; head < block->group; head++) {
            const int end = first + TILE_ROWS < block->rows ? first + TILE_ROWS : block->rows;
            float *partial = block->partial + head * (width + 2);
            vector sums[WIDEST_HEAD / LANES];
            for (int j = 0; j < width / LANES; j++) sums[j] = first ? load(partial + j * LANES) : (vector){0};
            for (int row = first; row < end; row++)
                for (int j = 0; j < width / LANES; j++) sums[j] += scores[head][row] * load(block->value + (size_t)row * width + j * LANES);
            for (int j = 0; j < width / LANES; j++) store(partial + j * LANES, sums[j]);
        }
}

INLINE void attend_rows(const struct block *block, int width)
{
    float scores[MOST_GROUP][BLOCK_ROWS];
    block_scores(block, scores, width);
    for (int head = 0; head < block->group; head++)
        block_exponentials(scores[head], block->rows, block->partial + head * (width + 2) + width);
    block_values(block, scores, width);
}

/* Common widths are constants, whose sums stay in registers. */
INLINE void attend_block(const struct block *block)
{
    if (block->width == 64)
        attend_rows(block, 64);
    else if (block->width == 128)
        attend_rows(block, 128);
    else
        attend_rows(block, block->width);
}
