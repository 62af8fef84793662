/* Attention of one query to the rows of a KV cache in float32, for heads whose query, key and value are equally wide:

       o = Σ_r exp(scale · q·k_r) v_r / Σ_r exp(scale · q·k_r)        L = ln Σ_r exp(scale · q·k_r)

   Rows are computed in blocks of BLOCK_ROWS, which threads share, and the results of blocks are merged by their largest scores and sums of
   exponentials (Dao et al. 2022, section 3.1). Blocks and the order of merging depend on the rows alone, so results do not depend on the
   number of threads. */
#ifndef ATTEND_PAGES_H
#define ATTEND_PAGES_H

#include <stddef.h>

enum { BLOCK_ROWS = 512, MOST_GROUP = 8, WIDEST_HEAD = 256 };

/* Rows of one key head, and at most MOST_GROUP query heads that attend to it. */
struct block {
    const float *query;       /* [group][width] */
    const float *key, *value; /* [rows][width] */
    int group, rows, width;   /* width is a multiple of MOST_LANES */
    float scale;
    float *partial; /* [group][width + 2]: Σ exp(s_r - most) v_r; most, the largest score; Σ exp(s_r - most) */
};

/* The computation for each instruction set. The first two exist on x86-64 only. */
void attend_block_avx512(const struct block *);
void attend_block_avx2(const struct block *);
void attend_block_portable(const struct block *);

/* Rows of a cache. Key and value are those of the first head; the next one is `stride` floats further. */
struct page {
    const float *key, *value;
    size_t stride;
    int rows;
};

struct query {
    const float *query; /* [kv_heads][group][width] */
    int kv_heads, group, width;
    float scale;
};

/* Compute output [kv_heads][group][width] and log_sum_exp [kv_heads][group], with up to `threads` threads. Returns 0 if memory is short. */
int attend_pages(void (*attend_block)(const struct block *), const struct query *, const struct page *pages, int count, int threads,
                 float *output, float *log_sum_exp);

#endif
