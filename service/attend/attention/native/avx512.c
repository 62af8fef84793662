#if defined(__x86_64__)
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512dq,avx512vl,fma")))
#include "kernel.h"
#include "pages_kernel.h"

TARGET void attend_avx512(const struct layer *layer, const struct item *item) { attend(layer, item); }
TARGET void attend_block_avx512(const struct block *block) { attend_block(block); }
#endif
