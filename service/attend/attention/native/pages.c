/* Blocks of a cache's rows, computed by several threads, and merged. */
#include "pages.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The threads of torch, which loads an OpenMP library before this code; another pool would compete with them. Without it, one thread. */
#if defined(__linux__)
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
#else
static void (*const GOMP_parallel)(void (*)(void *), void *, unsigned, unsigned) = NULL;
#endif

enum { ALONE = 1 << 17 }; /* floats that one thread reads in less time than others take to start, roughly */

struct work {
    void (*attend_block)(const struct block *);
    const struct query *query;
    const struct block *blocks;
    int count, next; /* number of blocks, and the first that no thread has taken */
};

static void take_blocks(void *shared)
{
    struct work *work = shared;
    for (int i; (i = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->count;) {
        struct block block = work->blocks[i];
        for (int left = block.group; left > 0; left -= MAX_GROUP) {
            block.group = left < MAX_GROUP ? left : MAX_GROUP;
            work->attend_block(&block);
            block.query += MAX_GROUP * block.width;
            if (block.bias) block.bias += MAX_GROUP * block.bias_stride;
            block.acc_m_l += MAX_GROUP * (block.width + 2);
        }
    }
}

static int blocks_of(int rows) { return (rows + KEYS_PER_BLOCK - 1) / KEYS_PER_BLOCK; }

static size_t rows_of(const struct page *pages, int count)
{
    size_t rows = 0;
    for (int i = 0; i < count; i++) rows += pages[i].rows;
    return rows;
}

/* Write the blocks of all pages, head by head: those of one head follow each other. */
static void cut(const struct query *query, const struct page *pages, int count, float *acc_m_l, struct block *to)
{
    const size_t width = query->width, size = query->group * (width + 2), all_rows = rows_of(pages, count);
    for (int head = 0; head < query->kv_heads; head++) {
        const float *bias = query->bias ? query->bias + head * query->group * all_rows : NULL;
        for (int i = 0; i < count; i++)
            for (int row = 0; row < pages[i].rows; row += KEYS_PER_BLOCK, acc_m_l += size) {
                const size_t at = head * pages[i].stride + row * width;
                const int rows = pages[i].rows - row < KEYS_PER_BLOCK ? pages[i].rows - row : KEYS_PER_BLOCK;
                *to++ = (struct block){query->query + head * query->group * width, pages[i].key + at, pages[i].value + at, bias, all_rows,
                                       query->group, rows, query->width, query->scale, acc_m_l};
                if (bias) bias += rows;
            }
    }
}

/* Merge the results of `count` blocks of one query head, `stride` floats apart. */
static void merge(const float *acc_m_l, int count, size_t stride, int width, float *output, float *log_sum_exp)
{
    float m = -INFINITY, l = 0;
    for (int i = 0; i < count; i++) m = fmaxf(m, acc_m_l[i * stride + width]);
    memset(output, 0, sizeof(float) * width);
    for (int i = 0; i < count; i++, acc_m_l += stride) {
        const float share = expf(acc_m_l[width] - m);
        l += share * acc_m_l[width + 1];
        for (int j = 0; j < width; j++) output[j] += share * acc_m_l[j];
    }
    for (int j = 0; j < width; j++) output[j] /= l;
    *log_sum_exp = m + logf(l);
}

int attend_pages(void (*attend_block)(const struct block *), const struct query *query, const struct page *pages, int count, int threads,
                 float *output, float *log_sum_exp)
{
    const size_t size = query->width + 2, group_size = query->group * size;
    int per_head = 0;
    for (int i = 0; i < count; i++) per_head += blocks_of(pages[i].rows);
    const size_t blocks = (size_t)per_head * query->kv_heads;
    struct block *list = malloc(blocks * (sizeof *list + group_size * sizeof(float)));
    if (!list) return 0;
    float *acc_m_l = (float *)(list + blocks);
    cut(query, pages, count, acc_m_l, list);
    struct work work = {attend_block, query, list, (int)blocks, 0};
    const int is_small = 2 * rows_of(pages, count) * query->kv_heads * query->width <= ALONE;
    if (threads > 1 && !is_small && GOMP_parallel)
        GOMP_parallel(take_blocks, &work, threads, 0);
    else
        take_blocks(&work);
    for (int head = 0; head < query->kv_heads * query->group; head++) {
        const float *first = acc_m_l + (size_t)(head / query->group) * per_head * group_size + head % query->group * size;
        merge(first, per_head, group_size, query->width, output + (size_t)head * query->width, log_sum_exp + head);
    }
    free(list);
    return 1;
}
