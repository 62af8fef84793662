#define LANES 4 /* SSE, NEON, or whatever the compiler makes of it */
#define TARGET
#include "kernel.h"

void attend_portable(const struct layer *layer, const struct item *item) { attend(layer, item); }
