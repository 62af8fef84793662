#define LANES 4 /* SSE, NEON or scalar code */
#define TARGET
#include "kernel.h"
#include "pages_kernel.h"

void attend_portable(const struct layer *layer, const struct item *item) { attend(layer, item); }
void attend_block_portable(const struct block *block) { attend_block(block); }
