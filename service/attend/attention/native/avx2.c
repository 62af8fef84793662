#if defined(__x86_64__)
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#include "kernel.h"
#include "pages_kernel.h"

TARGET void attend_avx2(const struct layer *layer, const struct item *item) { attend(layer, item); }
TARGET void attend_block_avx2(const struct block *block) { attend_block(block); }
#endif
