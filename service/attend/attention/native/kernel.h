/* The computation of short.h for one instruction set. avx512.c, avx2.c and portable.c include this file with LANES, the number of floats in a
   register, and TARGET, the attribute of functions that may use the instructions. */
#include "masks_kernel.h"
#include "short.h"
#include "vectors.h"

#define ROWS_AT_A_TIME 8 /* of a product: their sums stay in registers */

/* A matrix whose rows are `stride` floats apart. */
struct matrix {
    float *at;
    int stride;
};

INLINE float *row_of(struct matrix x, int row) { return x.at + (size_t)row * x.stride; }
INLINE struct matrix columns_from(struct matrix x, int column) { return (struct matrix){x.at + column, x.stride}; }

/* y [rows][columns] = x [rows][terms] w [terms][columns], plus bias [columns] unless that is NULL. Reads and writes whole vectors of columns.
   At the end, the last row may be computed several times. */
INLINE void multiply(struct matrix x, int rows, int terms, struct matrix w, int columns, const float *bias, struct matrix y)
{
    for (int column = 0; column < columns; column += LANES)
        for (int first = 0; first < rows; first += ROWS_AT_A_TIME) {
            vector sum[ROWS_AT_A_TIME];
            const float *row[ROWS_AT_A_TIME];
            for (int i = 0; i < ROWS_AT_A_TIME; i++) {
                row[i] = row_of(x, first + i < rows ? first + i : rows - 1);
                sum[i] = bias ? load(bias + column) : (vector){0};
            }
            for (int term = 0; term < terms; term++) {
                const vector factor = load(row_of(w, term) + column);
                for (int i = 0; i < ROWS_AT_A_TIME; i++) sum[i] += row[i][term] * factor;
            }
            for (int i = 0; i < ROWS_AT_A_TIME; i++) store(row_of(y, first + i < rows ? first + i : rows - 1) + column, sum[i]);
        }
}

/* Replace `n` numbers, followed by room for whole vectors, by their softmax, followed by zeros. */
INLINE void softmax(float *x, int n)
{
    static const float hide[2 * LANES] = {[LANES ... 2 * LANES - 1] = -INFINITY};
    const int end = (n + LANES - 1) / LANES * LANES;
    store(x + end - LANES, load(x + end - LANES) + load(hide + end - n));
    vector largest = load(x), sums = {0};
    for (int i = LANES; i < end; i += LANES) largest = choose(load(x + i) > largest, load(x + i), largest);
    const float m = largest_of(largest);
    for (int i = 0; i < end; i += LANES) {
        const vector e = exponential(load(x + i) - m);
        store(x + i, e);
        sums += e;
    }
    const float factor = 1 / sum_of(sums);
    for (int i = 0; i < end; i += LANES) store(x + i, load(x + i) * factor);
}

/* Copy rows to rows without gaps. Whole vectors are faster than memcpy; the next rows overwrite what is too much, as long as there are some. */
INLINE void copy_rows(struct matrix from, int rows, int columns, float *to)
{
    const float *const end = to + (size_t)rows * columns;
    for (int row = 0; row < rows; row++, to += columns)
        if (end - to >= whole_vectors(columns))
            for (int i = 0; i < columns; i += LANES) store(to + i, load(row_of(from, row) + i));
        else
            memcpy(to, row_of(from, row), sizeof(float) * columns);
}

/* The values of a head are read, and its outputs written, in whole vectors. The next head overwrites what is too much. */
INLINE void attend(const struct layer *layer, const struct item *item)
{
    const int width = layer->width, depth = width / layer->heads, queries = item->queries, keys = item->keys, rows[3] = {queries, keys, keys};
    struct matrix projected[3], concatenated, transposed, scores;
    projected[QUERY] = (struct matrix){item->scratch, layer->stride};
    projected[KEY] = (struct matrix){row_of(projected[QUERY], queries), layer->stride};
    projected[VALUE] = (struct matrix){row_of(projected[KEY], keys), layer->stride};
    concatenated = (struct matrix){row_of(projected[VALUE], keys), layer->stride};
    transposed = (struct matrix){row_of(concatenated, queries), whole_vectors(keys)};
    scores = (struct matrix){row_of(transposed, depth), whole_vectors(keys)};

    for (int i = QUERY; i <= VALUE; i++)
        multiply((struct matrix){(float *)item->input[i], width}, rows[i], width, (struct matrix){layer->weight[i], layer->stride}, width,
                 layer->bias[i], projected[i]);
    for (int head = 0; head < layer->heads; head++) {
        for (int i = 0; i < depth; i++)
            for (int key = 0; key < transposed.stride; key++)
                row_of(transposed, i)[key] = key < keys ? row_of(projected[KEY], key)[head * depth + i] * item->scale : 0;
        multiply(columns_from(projected[QUERY], head * depth), queries, depth, transposed, keys, NULL, scores);
        for (int query = 0; query < queries; query++)
            if (!item->masks || mask_row(layer, item, head, query, row_of(scores, query), row_of(scores, queries + query))) softmax(row_of(scores, query), keys);
        copy_rows(scores, queries, keys, item->weights + (size_t)head * queries * keys);
        multiply(scores, queries, keys, columns_from(projected[VALUE], head * depth), depth, NULL, columns_from(concatenated, head * depth));
        if (item->masks && item->masks->head_scale.at) {
            const float factor = number(row_in(&item->masks->head_scale, item->index, head, 0));
            for (int query = 0; query < queries; query++)
                for (int i = head * depth; i < (head + 1) * depth; i++) row_of(concatenated, query)[i] *= factor;
        }
    }
    multiply(concatenated, queries, width, (struct matrix){layer->weight[OUTPUT], layer->stride}, width, layer->bias[OUTPUT], projected[QUERY]);
    copy_rows(projected[QUERY], queries, width, item->output);
}
