/* What masks of a short call do to a row of scores, for one instruction set. See short.h for what they are, kernel.h for TARGET. */
#include "short.h"
#include "vectors.h"

/* The first number of a row, along its last axis. */
INLINE const char *row_in(const struct tensor *x, int item, int head, int query)
{
    return x->at + item * x->step[ITEM_AXIS] + head * x->step[HEAD_AXIS] + query * x->step[QUERY_AXIS];
}

INLINE int64_t whole_number(const char *at) { int64_t x; memcpy(&x, at, sizeof x); return x; }
INLINE float number(const char *at) { float x; memcpy(&x, at, sizeof x); return x; }

/* The first and last key that positions and lengths leave to a query. */
INLINE void interval(const struct masks *masks, int item, int query, int64_t *first, int64_t *last)
{
    if (masks->positions.at) {
        const int64_t position = whole_number(row_in(&masks->positions, item, 0, query));
        if (position - masks->left > *first) *first = position - masks->left;
        if (position + masks->right < *last) *last = position + masks->right;
        if (masks->chunk) {
            const int64_t remainder = position % masks->chunk, start = position - (remainder < 0 ? remainder + masks->chunk : remainder);
            if (start > *first) *first = start;
            if (start + masks->chunk - 1 < *last) *last = start + masks->chunk - 1;
        }
    }
    if (masks->lengths.at) {
        const int64_t length = whole_number(row_in(&masks->lengths, item, 0, query));
        if (length - 1 < *last) *last = length - 1;
    }
}

/* Hide the keys whose byte is 0. */
INLINE void hide(const struct tensor *mask, int item, int head, int query, int keys, float *row)
{
    const unsigned char *const bytes = (const unsigned char *)row_in(mask, item, head, query);
    const ptrdiff_t step = mask->step[KEY_AXIS];
    if (step == 1)
        for (int key = 0; key < keys; key++) row[key] = bytes[key] ? row[key] : -INFINITY;
    else
        for (int key = 0; key < keys; key++) row[key] = bytes[key * step] ? row[key] : -INFINITY;
}

/* Write what is added to the scores of a row, in whole vectors: the bias, and -inf for hidden keys. Returns whether a key is visible. */
INLINE int write_addends(const struct masks *masks, int item, int head, int query, int keys, float *row)
{
    int64_t first = 0, last = keys - 1;
    interval(masks, item, query, &first, &last);
    const int start = (int)(first < keys ? first : keys), stop = (int)(last < start ? start : last + 1);
    for (int key = 0; key < keys; key++) row[key] = (key >= start) & (key < stop) ? 0 : -INFINITY;
    if (masks->attend_mask.at) hide(&masks->attend_mask, item, head, query, keys, row);
    if (masks->attend_keys.at) hide(&masks->attend_keys, item, 0, 0, keys, row);
    if (masks->key_segments.at) {
        const int64_t own = whole_number(row_in(&masks->query_segments, item, 0, query));
        const char *const others = row_in(&masks->key_segments, item, 0, 0);
        for (int key = 0; key < keys; key++)
            if (whole_number(others + key * masks->key_segments.step[KEY_AXIS]) != own) row[key] = -INFINITY;
    }
    if (masks->bias.at) {
        const char *const biases = row_in(&masks->bias, item, head, query);
        for (int key = 0; key < keys; key++) row[key] += number(biases + key * masks->bias.step[KEY_AXIS]);
    }
    int visible = 0;
    for (int key = 0; key < keys; key++) visible |= row[key] > -INFINITY;
    for (int key = keys; key < whole_vectors(keys); key++) row[key] = 0;
    return visible;
}

/* Mask a row of scores, and note whether no key is visible. Returns whether one is. `addends`: those of the row, which are written for the
   first head, and for others if they differ. */
INLINE int mask_row(const struct layer *layer, const struct item *item, int head, int query, float *scores, float *addends)
{
    const struct masks *const masks = item->masks;
    unsigned char *const empty = masks->fully_masked + ((size_t)item->index * layer->heads + head) * item->queries + query;
    const int end = whole_vectors(item->keys);
    if (!head || masks->attend_mask.step[HEAD_AXIS] || masks->bias.step[HEAD_AXIS])
        *empty = !write_addends(masks, item->index, head, query, item->keys, addends);
    else
        *empty = empty[-item->queries];
    for (int i = 0; i < end; i += LANES) store(scores + i, *empty ? (vector){0} : load(scores + i) + load(addends + i));
    return !*empty;
}
