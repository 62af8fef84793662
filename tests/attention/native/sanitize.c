/* Random short calls and decoding steps in memory of exactly the promised sizes, so that the sanitizers see every access beyond it. Every
 * implementation must agree with a plain loop in double, and infinite and huge numbers must neither crash nor be hidden.
 *
 *     native=service/attend/attention/native
 *     gcc -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -I$native tests/attention/native/sanitize.c \
 *         $native/{short,pages,avx512,avx2,portable}.c -lm -o sanitize && ./sanitize CALLS SEED */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "short.h"

#define LARGEST_BIAS 0.5f

static unsigned long long state;

static unsigned draw(unsigned below) /* SplitMix64 */
{
    unsigned long long z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (unsigned)((z ^ z >> 31) >> 32) % below;
}

static float *random_numbers(size_t n, float size)
{
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = ((float)draw(2001) / 1000 - 1) * size;
    return x;
}

/* y [rows][width] = x w^T + b */
static double *project(const float *x, int rows, int width, const float *w, const float *b)
{
    double *y = malloc(sizeof *y * rows * width);
    for (int row = 0; row < rows; row++)
        for (int out = 0; out < width; out++) {
            double sum = b[out];
            for (int in = 0; in < width; in++) sum += (double)x[row * width + in] * w[out * width + in];
            y[row * width + out] = sum;
        }
    return y;
}

/* Tensors of numbers of `size` bytes in memory of exactly their size, with each axis of `axes` or 1 in its place. */
static struct tensor random_tensor(const char *axes, const int lengths[AXES], size_t size)
{
    struct tensor x = {0};
    size_t n = 1;
    for (int axis = AXES; axis--;)
        if (strchr(axes, "bhqk"[axis]) && draw(2)) {
            x.step[axis] = (ptrdiff_t)(n * size);
            n *= lengths[axis];
        }
    char *at = malloc(n * size);
    for (size_t i = 0; i < n; i++) {
        const float number = draw(3) ? (float)draw(2001) / 1000 - 1 : -INFINITY;
        const int64_t whole = (int64_t)draw(60) - 20;
        const char byte = draw(4) > 0;
        memcpy(at + i * size, size == 1 ? (const void *)&byte : size == 4 ? (const void *)&number : &whole, size);
    }
    x.at = at;
    return x;
}

/* A few masks of each kind; some rows have no visible key. */
static struct masks random_masks(int heads, int queries, int keys)
{
    const int lengths[AXES] = {1, heads, queries, keys};
    struct masks masks = {.left = draw(50), .right = draw(50), .chunk = draw(3) ? 0 : 1 + draw(40)};
    if (draw(2)) masks.positions = random_tensor("bq", lengths, 8);
    if (draw(2)) masks.lengths = random_tensor("bq", lengths, 8);
    if (draw(2)) masks.attend_mask = random_tensor("bhqk", lengths, 1);
    if (draw(2)) masks.attend_keys = random_tensor("bk", lengths, 1);
    if (!draw(4)) masks.query_segments = random_tensor("bq", lengths, 8), masks.key_segments = random_tensor("bk", lengths, 8);
    if (draw(2)) masks.bias = random_tensor("bhqk", lengths, 4);
    masks.fully_masked = malloc((size_t)heads * queries);
    return masks;
}

static void free_masks(struct masks *masks)
{
    const struct tensor *all = &masks->positions;
    for (int i = 0; i < 8; i++) free((char *)all[i].at);
    free(masks->fully_masked);
}

static int64_t whole_at(struct tensor x, int head, int query, int key)
{
    int64_t n;
    memcpy(&n, x.at + head * x.step[HEAD_AXIS] + query * x.step[QUERY_AXIS] + key * x.step[KEY_AXIS], sizeof n);
    return n;
}

static int byte_at(struct tensor x, int head, int query, int key)
{
    return x.at[head * x.step[HEAD_AXIS] + query * x.step[QUERY_AXIS] + key * x.step[KEY_AXIS]];
}

/* What masks add to a score: a bias, or -inf. */
static double addend(const struct masks *masks, int head, int query, int key)
{
    float bias = 0;
    if (masks->bias.at)
        memcpy(&bias, masks->bias.at + head * masks->bias.step[HEAD_AXIS] + query * masks->bias.step[QUERY_AXIS] + key * masks->bias.step[KEY_AXIS],
               sizeof bias);
    if (masks->positions.at) {
        const int64_t p = whole_at(masks->positions, head, query, 0);
        if (key < p - masks->left || key > p + masks->right) return -INFINITY;
        if (masks->chunk && floor((double)p / (double)masks->chunk) != floor((double)key / (double)masks->chunk)) return -INFINITY;
    }
    if (masks->lengths.at && key >= whole_at(masks->lengths, head, query, 0)) return -INFINITY;
    if (masks->attend_mask.at && !byte_at(masks->attend_mask, head, query, key)) return -INFINITY;
    if (masks->attend_keys.at && !byte_at(masks->attend_keys, head, query, key)) return -INFINITY;
    if (masks->key_segments.at && whole_at(masks->key_segments, head, query, key) != whole_at(masks->query_segments, head, query, 0)) return -INFINITY;
    return bias;
}

/* The attention weights [heads][queries][keys] and the weighted values [queries][width]. */
static void attend(double *const projected[3], const struct masks *masks, int queries, int keys, int width, int heads, double scale, double *weights,
                   float *values)
{
    const int depth = width / heads;
    for (int head = 0; head < heads; head++)
        for (int query = 0; query < queries; query++) {
            double *row = weights + ((size_t)head * queries + query) * keys, most = -INFINITY, sum = 0;
            for (int key = 0; key < keys; key++) {
                row[key] = 0;
                for (int i = head * depth; i < (head + 1) * depth; i++) row[key] += projected[0][query * width + i] * projected[1][key * width + i];
                row[key] = row[key] * scale + (masks ? addend(masks, head, query, key) : 0);
                most = fmax(most, row[key]);
            }
            for (int key = 0; key < keys; key++) sum += row[key] = most > -INFINITY ? exp(row[key] - most) : 0;
            for (int key = 0; key < keys && sum; key++) row[key] /= sum;
            for (int i = head * depth; i < (head + 1) * depth; i++) {
                double value = 0;
                for (int key = 0; key < keys; key++) value += row[key] * projected[2][key * width + i];
                values[query * width + i] = (float)value;
            }
        }
}

/* Abort unless numbers are near, by the size of the largest of them or of their terms, of which one may be `term`: these may cancel out. */
static void compare(const char *what, const char *variant, const float *got, const double *wanted, size_t n, double term)
{
    double largest = term;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs(wanted[i]));
    for (size_t i = 0; i < n; i++)
        if (!(fabs(got[i] - wanted[i]) <= 1e-5 * largest)) {
            fprintf(stderr, "%s of %s: %g instead of %g\n", what, variant, got[i], wanted[i]);
            abort();
        }
}

static void one_call(void)
{
    const int heads = 1 + (int)draw(8), width = heads * (1 + (int)draw(20)), queries = 1 + (int)draw(40), keys = 1 + (int)draw(40);
    const int rows[3] = {queries, keys, keys}, is_extreme = !draw(8);
    const size_t pairs = (size_t)heads * queries * keys, outputs = (size_t)queries * width;
    struct item item = {.queries = queries, .keys = keys, .scale = 1 / sqrtf((float)width / heads)};
    float *weight[PROJECTIONS], *bias[PROJECTIONS], *values = malloc(sizeof *values * outputs);
    double *projected[3], *weights = malloc(sizeof *weights * pairs);
    for (int i = 0; i < PROJECTIONS; i++) {
        weight[i] = random_numbers((size_t)width * width, 1.5f / sqrtf((float)width));
        bias[i] = random_numbers(width, LARGEST_BIAS);
    }
    for (int i = QUERY; i <= VALUE; i++) {
        item.input[i] = random_numbers((size_t)rows[i] * width, is_extreme ? 3e38f : 1);
        projected[i] = project(item.input[i], rows[i], width, weight[i], bias[i]);
    }
    struct masks masks = random_masks(heads, queries, keys);
    if (draw(2)) item.masks = &masks;
    attend(projected, item.masks, queries, keys, width, heads, item.scale, weights, values);
    double *wanted = project(values, queries, width, weight[OUTPUT], bias[OUTPUT]);
    item.output = malloc(sizeof(float) * outputs);
    item.weights = malloc(sizeof(float) * pairs);
    for (const struct variant *variant = variants + first_variant(); variant->name; variant++) {
        struct layer *layer = new_layer(variant, width, heads);
        for (int i = 0; i < PROJECTIONS; i++) set_projection(layer, i, weight[i], bias[i]);
        item.scratch = malloc(sizeof(float) * scratch_size(layer, queries, keys));
        variant->attend(layer, &item);
        if (!is_extreme) {
            compare("weights", variant->name, item.weights, weights, pairs, 0);
            compare("output", variant->name, item.output, wanted, outputs, LARGEST_BIAS);
        }
        free(item.scratch);
        free(layer);
    }
    for (int i = 0; i < PROJECTIONS; i++) free(weight[i]), free(bias[i]);
    for (int i = QUERY; i <= VALUE; i++) free((float *)item.input[i]), free(projected[i]);
    free_masks(&masks);
    free(item.output), free(item.weights), free(wanted), free(weights), free(values);
}

static void one_step(void)
{
    enum { MOST_PAGES = 3 };
    const int kv_heads = 1 + (int)draw(3), group = 1 + (int)draw(10), width = 1 + (int)draw(WIDEST_HEAD), count = 1 + (int)draw(MOST_PAGES);
    const int heads = kv_heads * group, is_extreme = !draw(8);
    struct page pages[MOST_PAGES];
    for (int i = 0; i < count; i++) {
        const int rows = 1 + (int)draw(draw(2) ? 20 : 3 * KEYS_PER_BLOCK / 2);
        const size_t stride = (size_t)rows * width;
        pages[i] = (struct page){random_numbers(kv_heads * stride, is_extreme ? 3e38f : 1), random_numbers(kv_heads * stride, 1), stride, rows};
    }
    size_t all_rows = 0, row_of_page = 0;
    for (int i = 0; i < count; i++) all_rows += pages[i].rows;
    const float *bias = draw(2) ? random_numbers(heads * all_rows, 1) : NULL;
    struct query query = {random_numbers((size_t)heads * width, is_extreme ? 3e38f : 1), bias, kv_heads, group, width, 0.25f};
    double *wanted = calloc((size_t)heads * width, sizeof *wanted), *totals = malloc(heads * sizeof *totals);
    for (int head = 0; head < heads; head++) {
        double most = -INFINITY, sum = 0;
        for (int pass = 0; pass < 2; pass++)
            for (int i = row_of_page = 0; i < count; row_of_page += pages[i++].rows)
                for (int row = 0; row < pages[i].rows; row++) {
                    const size_t at = head / group * pages[i].stride + (size_t)row * width;
                    double score = 0;
                    for (int j = 0; j < width; j++) score += query.scale * query.query[head * width + j] * pages[i].key[at + j];
                    if (bias) score += bias[head * all_rows + row_of_page + row];
                    if (!pass) {
                        most = fmax(most, score);
                        continue;
                    }
                    sum += exp(score - most);
                    for (int j = 0; j < width; j++) wanted[head * width + j] += exp(score - most) * pages[i].value[at + j];
                }
        for (int j = 0; j < width; j++) wanted[head * width + j] /= sum;
        totals[head] = most + log(sum);
    }
    float *output = malloc(sizeof(float) * heads * width), *log_sum_exp = malloc(sizeof(float) * heads);
    for (const struct variant *variant = variants + first_variant(); variant->name; variant++) {
        if (!attend_pages(variant->attend_block, &query, pages, count, 2, output, log_sum_exp)) abort();
        if (!is_extreme) {
            compare("output of steps", variant->name, output, wanted, (size_t)heads * width, 1);
            compare("log-sum-exp", variant->name, log_sum_exp, totals, heads, 1);
        }
    }
    for (int i = 0; i < count; i++) free((float *)pages[i].key), free((float *)pages[i].value);
    free((float *)query.query), free((float *)bias), free(wanted), free(totals), free(output), free(log_sum_exp);
}

int main(int count, char **arguments)
{
    const int calls = count > 1 ? atoi(arguments[1]) : 1000;
    state = count > 2 ? strtoull(arguments[2], NULL, 10) : 1;
    for (int i = 0; i < calls; i++) one_call();
    for (int i = 0; i < calls / 10; i++) one_step();
    printf("%d calls and a tenth as many steps, in each implementation from %s on\n", calls, variants[first_variant()].name);
}
