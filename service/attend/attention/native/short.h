/* Multi-head attention of one short call, in float32 (Vaswani et al. 2017, equation 1):

       Q = x_q W_qᵀ + b_q    K = x_k W_kᵀ + b_k    V = x_v W_vᵀ + b_v        split into heads
       weights = softmax(scale · Q Kᵀ + bias), over the keys that masks leave to a query; 0 if they leave none
       output = (head_scale · weights V, heads side by side) W_oᵀ + b_o

   Every row is summed by itself and in the same order, so a result does not depend on other rows or items. */
#ifndef ATTEND_SHORT_H
#define ATTEND_SHORT_H

#include <stddef.h>
#include <stdint.h>

#include "pages.h"

enum { QUERY, KEY, VALUE, OUTPUT, PROJECTIONS };
enum { ITEM_AXIS, HEAD_AXIS, QUERY_AXIS, KEY_AXIS, AXES };

struct layer {
    const struct variant *variant;
    int width, heads;           /* of every input, projection and output; width is a multiple of heads */
    int stride;                 /* floats from one row of a weight to the next */
    float *weight[PROJECTIONS]; /* transposed, [in][out] */
    float *bias[PROJECTIONS];
};

/* A tensor with some of the axes: the bytes from one number to the next along each, 0 if it has one number for all. `at` is NULL if there is
   none. */
struct tensor {
    const char *at;
    ptrdiff_t step[AXES];
};

/* What restricts the keys of a query at position p, and what else changes its row. */
struct masks {
    struct tensor positions;                    /* int64 [item][query] */
    struct tensor lengths;                      /* int64 [item][query]: only so many keys are visible */
    struct tensor attend_mask, attend_keys;     /* bytes [item][head][query][key] and [item][key]: 0 hides */
    struct tensor query_segments, key_segments; /* int64 [item][query] and [item][key]: a key of another segment is hidden */
    struct tensor bias;                         /* float [item][head][query][key], added to the scores; -inf hides */
    struct tensor head_scale;                   /* float [item][head], factors of the heads' outputs */
    int64_t left, right, chunk;                 /* visible are the keys p - left to p + right, in the chunk of p; chunk 0: none */
    unsigned char *fully_masked;                /* [items][heads][queries]: whether no key is visible; written */
};

/* One element of the batch axis. */
struct item {
    int index;
    const struct masks *masks; /* NULL: none */
    const float *input[3];  /* query [queries][width], key and value [keys][width] */
    int queries, keys;
    float scale;
    float *output;   /* [queries][width] */
    float *weights;  /* [heads][queries][keys] */
    float *scratch;  /* scratch_size() floats */
};

/* The computation for each instruction set. The first two exist on x86-64 only. */
void attend_avx512(const struct layer *, const struct item *);
void attend_avx2(const struct layer *, const struct item *);
void attend_portable(const struct layer *, const struct item *);

/* All of them, fastest first; the last has no name. The processor can run those from first_variant() on. */
extern const struct variant {
    const char *name;
    void (*attend)(const struct layer *, const struct item *);
    void (*attend_block)(const struct block *);
} variants[];
int first_variant(void);

/* A layer whose weights are zero; NULL if memory is short. free() frees it. */
struct layer *new_layer(const struct variant *variant, int width, int heads);

/* Copy a weight [out][in] and a bias [out]. */
void set_projection(struct layer *layer, int projection, const float *weight, const float *bias);

/* Matrices are read and written in vectors of up to MOST_LANES floats, also at the end of a row. */
enum { MOST_LANES = 16 };
static inline int whole_vectors(int n) { return (n + MOST_LANES - 1) / MOST_LANES * MOST_LANES; }

/* Floats from one row to the next: room for a vector beyond the width, and an odd number of cache lines, since a column whose rows are a
   power of two apart would fit only few places of the cache. */
static inline int stride_of(int width) { return whole_vectors(width + MOST_LANES) | MOST_LANES; }

static inline size_t scratch_size(const struct layer *layer, int queries, int keys)
{
    const size_t rows = 2 * (size_t)queries + 2 * (size_t)keys, depth = layer->width / layer->heads;
    return rows * layer->stride + (depth + 2 * (size_t)queries) * whole_vectors(keys) + MOST_LANES;
}

#endif
