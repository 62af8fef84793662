/* Attention of one query to the rows of a KV cache in float32, for heads whose query, key and value are equally wide:

       s_r = scale · q·k_r + bias_r        o = Σ_r exp(s_r) v_r / Σ_r exp(s_r)        L = ln Σ_r exp(s_r)

   Rows are computed in blocks of KEYS_PER_BLOCK, which threads share. As in FlashAttention (Dao et al. 2022, section 3.1), a block yields m,
   its largest score, l = Σ_r exp(s_r - m) and acc = Σ_r exp(s_r - m) v_r, by which blocks are merged. Blocks and the order of merging depend
   on the rows alone, so results do not depend on the number of threads. */
#ifndef ATTEND_PAGES_H
#define ATTEND_PAGES_H

#include <stddef.h>

enum { KEYS_PER_BLOCK = 512, MAX_GROUP = 8, WIDEST_HEAD = 256 };

/* Rows of one key head, and at most MAX_GROUP query heads that attend to it. */
struct block {
    const float *query;       /* [group][width] */
    const float *key, *value; /* [rows][width] */
    const float *bias;        /* [group][rows], bias_stride apart; NULL: 0 */
    size_t bias_stride;
    int group, rows, width;
    float scale;
    float *acc_m_l; /* [group][width + 2]: acc [width], m, l */
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
    const float *bias;  /* [kv_heads][group][rows of all pages]; NULL: 0 */
    int kv_heads, group, width;
    float scale;
};

/* Compute output [kv_heads][group][width] and log_sum_exp [kv_heads][group], with up to `threads` threads. Returns 0 if memory is short. */
int attend_pages(void (*attend_block)(const struct block *), const struct query *, const struct page *pages, int count, int threads,
                 float *output, float *log_sum_exp);

#endif
