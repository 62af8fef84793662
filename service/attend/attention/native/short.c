/* Layers in memory, and which implementations this processor can run. */
#include "short.h"

#include <stdlib.h>
#include <string.h>

const struct variant variants[] = {
#if defined(__x86_64__)
    {"avx512", attend_avx512, attend_block_avx512},
    {"avx2", attend_avx2, attend_block_avx2},
#endif
    {"portable", attend_portable, attend_block_portable},
    {NULL, NULL, NULL},
};

int first_variant(void)
{
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 2;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? 0 : 1;
#else
    return 0;
#endif
}

struct layer *new_layer(const struct variant *variant, int width, int heads)
{
    const size_t stride = stride_of(width), projection = stride * ((size_t)width + 1);
    struct layer *layer = calloc(1, sizeof *layer + PROJECTIONS * projection * sizeof(float));
    if (!layer) return NULL;
    float *numbers = (float *)(layer + 1);
    for (int i = 0; i < PROJECTIONS; i++) {
        layer->weight[i] = numbers + projection * i;
        layer->bias[i] = layer->weight[i] + stride * width;
    }
    layer->variant = variant;
    layer->width = width;
    layer->heads = heads;
    layer->stride = (int)stride;
    return layer;
}

void set_projection(struct layer *layer, int projection, const float *weight, const float *bias)
{
    float *to = layer->weight[projection];
    for (int out = 0; out < layer->width; out++)
        for (int in = 0; in < layer->width; in++) to[(size_t)in * layer->stride + out] = weight[(size_t)out * layer->width + in];
    memcpy(layer->bias[projection], bias, sizeof(float) * layer->width);
}
