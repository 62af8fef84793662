#define LANES 4 /* SSE, NEON or scalar code */
#define TARGET
#include "kernel.h"

void attend_portable(const struct layer *layer, const struct item *item) { attend(layer, item); }
